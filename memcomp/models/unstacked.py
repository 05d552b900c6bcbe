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


class Unstacked(NamedTuple):
  """The unstacked states of the layers of a stack.

  Attributes:
    layers: the state of each layer, in order.
  """

  layers: tuple[Any, ...]


def unstack(stacked: Any) -> Unstacked:
  """Unstacks states that are stacked by layer along axis 0."""
  count = len(jax.tree.leaves(stacked)[0])
  return Unstacked(
    tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count))
  )


def stack(states: Any) -> Any:
  """Stacks the states of layers along axis 0, unless they are stacked."""
  if not isinstance(states, Unstacked):
    return states
  return jax.tree.map(lambda *x: jnp.stack(x), *states.layers)


def of_layer(states: Any, row: int) -> Any:
  """Returns the state of one layer of a stack, in either form."""
  if isinstance(states, Unstacked):
    return states.layers[row]
  return jax.tree.map(lambda x: x[row], states)


def field(results: Any, index: int) -> Any:
  """One field of the results of a stack's layers, in the given form."""
  if isinstance(results, Unstacked):
    return Unstacked(tuple(layer[index] for layer in results.layers))
  return results[index]


def scan(
  body: Callable[[jax.Array, tuple], tuple[jax.Array, tuple]],
  x: jax.Array,
  params: Any,
  states: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
  """Runs all layers in order: `lax.scan`, or unrolled for unstacked states.

  Args:
    body: maps x and (index, params, states) of a layer to x and the results of
      the layer, one of each stack.
    x: input of the first layer.
    params: parameters, stacked by layer along axis 0.
    states: states of the interleaved stacks, all stacked or all `Unstacked`.

  Returns:
    The output of the last layer, and the results in the form of the states.
  """
  if not isinstance(states[0], Unstacked):
    count = len(jax.tree.leaves(params)[0])
    return lax.scan(body, x, (jnp.arange(count), params, states))
  new = []
  for index, layer_states in enumerate(
    zip(*(s.layers for s in states), strict=True)
  ):
    layer_params = jax.tree.map(lambda p, i=index: p[i], params)
    x, layer_new = body(x, (index, layer_params, layer_states))
    new.append(layer_new)
  return x, tuple(Unstacked(layers) for layers in zip(*new, strict=True))
