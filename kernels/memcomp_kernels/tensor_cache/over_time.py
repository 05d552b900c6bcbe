"""State passing for Tensor Cache: windows and memories combine over shards.

A window is passed on like attention's (`softmax_attention.over_time`). Given
the window, the memory A after a shard is linear in the memories before it. So
is S, the memory at the chunk's start (only with write_population "all"):

  A <- D_AA A + B_A,   S <- D_SA A + D_SS S + B_S

where each D is a number per memory and row. All shards find B and D at once.
For this they run from empty memories with two more columns, in which A and S
are one. The state before a shard follows from the shards before it, and the
shard runs again from that state.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels.parallel import state_passing, wavefront
from memcomp_kernels.tensor_cache import reference

Levels = tuple[jax.Array, ...]


def strategy(spec: reference.Spec) -> state_passing.Strategy:
  """Returns the state passing strategy of a Tensor Cache.

  It is a wavefront for the delta rule and the wedge, which mix rows, and for
  chunk means, which are not linear.
  """
  if spec.rule != "outer" or spec.chunk_mean:
    return wavefront.pass_state
  return functools.partial(_pass_state, spec)


def _pass_state(
  spec: reference.Spec,
  chunk: state_passing.Chunk,
  axis: str,
  state: reference.State,
  inputs: reference.Inputs,
  segment_ids: jax.Array | None,
  reset_state: reference.State,
) -> tuple[Any, ...]:
  before = state_passing.ids_before(axis, state.segment_id, segment_ids)
  route = inputs.write_route if spec.routes_evicted else None
  rows, position = state_passing.window_before(
    axis,
    (state.window, state.position),
    reference.Window(inputs.key, inputs.value, route),
    segment_ids,
    before,
    (reset_state.window, reset_state.position),
    sink_tokens=spec.sink_tokens,
  )
  first = state._replace(window=rows, position=position, segment_id=before)

  def run(state, inputs, reset):
    reset = None if segment_ids is None else reset
    return chunk(state, inputs, segment_ids=segment_ids, reset_state=reset)

  empty = _with_columns(first, empty=True)
  left, *_ = run(
    empty,
    inputs._replace(value=_pad(inputs.value)),
    _with_columns(reset_state, empty=False),
  )
  then = functools.partial(_then, state.memories.memory.shape[-1])
  earlier = state_passing.scan_before(then, axis, _levels(left), _levels(empty))
  handed = then(_levels(_with_columns(state, empty=False)), earlier)
  first = first._replace(
    memories=_memories(state.memories, handed[0]),
    starts=_memories(state.starts, handed[-1]),
  )
  after, outputs, *stats = run(first, inputs, reset_state)
  return state_passing.of_last(after, axis), outputs, *stats


def _with_columns(state: reference.State, *, empty: bool) -> reference.State:
  """Adds two columns to the memories: zeros, or D for empty memories."""

  def wide(memories: Any, column: int) -> Any:
    if memories is None:
      return None
    if empty:
      memories = jax.tree.map(jnp.zeros_like, memories)
    memory = _pad(memories.memory)
    if empty:
      memory = memory.at[..., column].set(1)
    return memories._replace(memory=memory)

  rows = state.window._replace(value=_pad(state.window.value))
  return state._replace(
    window=rows,
    memories=wide(state.memories, -2),
    starts=wide(state.starts, -1),
  )


def _pad(x: jax.Array) -> jax.Array:
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 2)])


def _levels(state: reference.State) -> Levels:
  """Returns A and S: the memory's columns, the two of D, the normalizer."""

  def level(memories):
    if memories.normalizer is None:
      return memories.memory
    column = memories.normalizer[..., None]
    return jnp.concatenate([memories.memory, column], axis=-1)

  return tuple(
    level(x) for x in (state.memories, state.starts) if x is not None
  )


def _then(value_dim: int, first: Levels, second: Levels) -> Levels:
  """Applies `second` to `first`."""

  def level(x):
    found = x.at[..., value_dim : value_dim + 2].set(0)
    for column, y in enumerate(first, value_dim):
      found += x[..., column : column + 1] * y
    return found

  return tuple(map(level, second))


def _memories(like: reference.Memories | None, level: jax.Array) -> Any:
  """Undoes `_levels` for one level."""
  if like is None:
    return None
  memory = level[..., : like.memory.shape[-1]]
  normalizer = None if like.normalizer is None else level[..., -1]
  return reference.Memories(memory, normalizer)
