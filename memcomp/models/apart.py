"""Unstacked layer states, for loops over tokens.

A scan over stacked layers slices each layer's state and writes it back, which
copies all memories for each token. With unstacked states, a loop updates them
in place, but its program grows with the number of layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Apart(NamedTuple):
  """The unstacked states of the layers of a stack.

  Attributes:
    layers: the state of each layer, in order.
  """

  layers: tuple[Any, ...]


def split(stacked: Any) -> Apart:
  """Unstacks states that are stacked by layer along axis 0."""
  count = len(jax.tree.leaves(stacked)[0])
  return Apart(
    tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count))
  )


def join(states: Apart) -> Any:
  """Stacks the states of layers along axis 0."""
  return jax.tree.map(lambda *x: jnp.stack(x), *states.layers)


def scan(
  body: Callable[[jax.Array, tuple], tuple[jax.Array, tuple]],
  x: jax.Array,
  params: Any,
  states: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
  """Runs all layers in order: `lax.scan`, or unrolled for unstacked states.

  Args:
    body: maps x and (index, params, states) of a layer to x and new states.
    x: input of the first layer.
    params: parameters, stacked by layer along axis 0.
    states: states of the interleaved stacks, all stacked or all `Apart`.

  Returns:
    The output of the last layer, and the new states in the given form.
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
