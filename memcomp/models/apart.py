"""Layers' states apart instead of stacked, for loops over tokens.

A scan over stacked layers cuts each layer's state out of the stack and puts the
new one back: a copy of all memories for each token. Apart, a loop updates them
where they lie; its program grows with the number of layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Apart(NamedTuple):
  """The states of the layers of a stack.

  Attributes:
    layers: of each, the first first.
  """

  layers: tuple[Any, ...]


def split(stacked: Any) -> Apart:
  """Takes states apart that are stacked by layer at axis 0."""
  count = len(jax.tree.leaves(stacked)[0])
  return Apart(
    tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count))
  )


def join(states: Apart) -> Any:
  """Stacks the states of layers at axis 0."""
  return jax.tree.map(lambda *x: jnp.stack(x), *states.layers)


def scan(
  body: Callable[[jax.Array, tuple], tuple[jax.Array, tuple]],
  x: jax.Array,
  params: Any,
  states: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
  """Runs layer after layer: `lax.scan`, or unrolled where states are apart.

  Args:
    body: maps x and (index, params, states) of a layer to x and new states.
    x: what the first layer is given.
    params: stacked by layer at axis 0.
    states: of the stacks that take turns, all stacked or all `Apart`.

  Returns:
    What the last layer gives, and states as they came.
  """
  if not isinstance(states[0], Apart):
    count = len(jax.tree.leaves(params)[0])
    return lax.scan(body, x, (jnp.arange(count), params, states))
  after = []
  for index, here in enumerate(zip(*(s.layers for s in states), strict=True)):
    of_layer = jax.tree.map(lambda p, i=index: p[i], params)
    x, new = body(x, (index, of_layer, here))
    after.append(new)
  return x, tuple(Apart(layers) for layers in zip(*after, strict=True))
