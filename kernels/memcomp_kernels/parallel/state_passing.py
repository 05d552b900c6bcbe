"""State passing: a memory over shards of time (sequence parallelism).

Each shard starts from the state that the shard before it ends with. The code
runs inside `jax.shard_map` with every axis manual. `state` and `reset_state`
are the same on all shards of `axis`; inputs and segment ids are the shard's own
tokens. A `Strategy` is a callable

  (chunk, axis, state, inputs, segment_ids, reset_state) -> what `chunk` returns

that returns the state after the last shard's last token, the same on all
shards.

`wavefront.pass_state` works for every memory: shards work at the same time on
different rows and heads. `linear` is for memories that are linear in state and
value. Their shards run from a zero state, then combine in log2(shards) small
messages. Attention and Tensor Cache build strategies of their own from the same
functions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, window
from memcomp_kernels.contract import einsum

Chunk = Callable[..., tuple[Any, ...]]
Strategy = Callable[..., tuple[Any, ...]]


def linear(
  chunk: Chunk,
  axis: str,
  state: Any,
  inputs: Any,
  segment_ids: jax.Array | None,
  reset_state: Any,
) -> tuple[Any, ...]:
  """Combines shards of a memory that is linear in its state and in values.

  Every shard runs once, from a zero state, with values [v | 0] and memories
  [0 | I] `[key, value + key]`. The second half of its reads and of its memory
  is then the map that the shard applies to any state it is passed. This costs
  twice the memory's work of one shard (for value_dim = key_dim), but no shard
  waits for another.

  Args:
    chunk: see `wavefront.pass_state`. The state has only `memory` `[batch,
      heads, key, value]` and `segment_id`; the inputs have `value`.
    axis: mesh axis over which time is sharded.
    state: the state before the first shard's first token.
    inputs: inputs of this shard.
    segment_ids: segment ids of this shard, or None.
    reset_state: the state that new segments start from.
  """
  key_dim, value_dim = state.memory.shape[-2:]
  before = ids_before(axis, state.segment_id, segment_ids)
  zeros = jnp.zeros_like(state.memory)
  ones = jnp.broadcast_to(
    jnp.eye(key_dim, dtype=zeros.dtype), (*zeros.shape[:-1], key_dim)
  )

  def wide(state, memory, right):
    memory = jnp.concatenate([memory, right], axis=-1)
    return state._replace(memory=memory, segment_id=before)

  reset = None
  if segment_ids is not None:
    reset = wide(reset_state, reset_state.memory, jnp.zeros_like(ones))
  value = jnp.pad(inputs.value, [(0, 0)] * 3 + [(0, key_dim)])
  after, outputs, *stats = chunk(
    wide(state, zeros, ones),
    inputs._replace(value=value),
    segment_ids=segment_ids,
    reset_state=reset,
  )

  def then(memory, change):
    """Applies M -> A M + B, given [B | A] and whether a segment started."""
    matrix, restarted = change
    if restarted is not None:
      # A is zero there, and zero times what is not finite would not be.
      memory = contract.batched_where(restarted, jnp.zeros_like(memory), memory)
    found = einsum("bhij,bhjv->bhiv", matrix[..., value_dim:], memory)
    return found.at[..., :value_dim].add(matrix[..., :value_dim])

  def both(first, second):
    (matrix, restarted), (_, later) = first, second
    either = None if restarted is None else restarted | later
    return then(matrix, second), either

  restarted, reads = None, lambda x: x
  if segment_ids is not None:
    starts, _ = contract.segment_starts(segment_ids, before)
    continues = (jnp.cumsum(starts, axis=1) == 0) & (segment_ids != 0)
    restarted = jnp.any(starts, axis=1)

    def reads(x):  # of the tokens that continue the segment before the shard
      return jnp.where(continues[..., None, None], x, 0)

  own = after.memory, restarted
  none = None if restarted is None else jnp.zeros_like(restarted)
  nothing = jnp.concatenate([zeros, ones], axis=-1), none
  first = then(state.memory, scan_before(both, axis, own, nothing))
  last = after._replace(memory=then(first, own))
  probes = reads(outputs[..., value_dim:].astype(first.dtype))
  read = reads(einsum("bthk,bhkv->bthv", probes, first))
  outputs = outputs[..., :value_dim] + read.astype(outputs.dtype)
  return of_last(last, axis), outputs, *stats


def scan_before(
  then: Callable[[Any, Any], Any], axis: str, value: Any, nothing: Any
) -> Any:
  """Combines the values of all shards before this one.

  Args:
    then: associative function, (earlier, later) -> both.
    axis: mesh axis.
    value: value of this shard.
    nothing: result on the first shard.
  """
  shards, shard = lax.axis_size(axis), lax.axis_index(axis)
  distance = 1
  while distance < shards:
    both = then(send(value, axis, distance), value)
    value = where(shard >= distance, both, value)
    distance *= 2
  return where(shard > 0, send(value, axis, 1), nothing)


def window_before(
  axis: str,
  state: tuple[Any, jax.Array],
  tokens: Any,
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  reset: tuple[Any, jax.Array],
  *,
  sink_tokens: int,
) -> tuple[Any, jax.Array]:
  """Returns the rows and position of the `window` before each shard.

  What tokens leave in a window does not depend on earlier tokens. So all shards
  compute it at once, and windows combine in log2(shards) messages of one window
  each.

  Args:
    axis: mesh axis over which time is sharded.
    state: rows and position before the first shard's first token.
    tokens: `[batch, time, heads, ...]` leaves of this shard.
    segment_ids: `[batch, time]` of this shard, or None.
    segment_id: `[batch]`, result of `ids_before`.
    reset: rows and position that new segments start from.
    sink_tokens: number of rows that keep the first tokens.
  """
  then = functools.partial(_after, sink_tokens=sink_tokens)
  rows, position = state
  own = _summarize(
    rows, tokens, segment_ids, segment_id, reset, sink_tokens=sink_tokens
  )
  nothing = jax.tree.map(jnp.zeros_like, own)
  start = _Summary(rows, position, nothing.restarted)
  found = then(start, scan_before(then, axis, own, nothing))
  return found.rows, found.position


class _Summary(NamedTuple):
  """What tokens leave in an empty window; `_after` combines summaries.

  Attributes:
    rows: `[batch, heads, size, ...]` leaves.
    position: int32 `[batch]`, position of the segment at the end, counted from
      the first of these tokens or from the start of their last segment.
    restarted: bool `[batch]`, whether a segment started among these tokens.
  """

  rows: Any
  position: jax.Array
  restarted: jax.Array


def _after(first: _Summary, second: _Summary, *, sink_tokens: int) -> _Summary:
  """Returns the summary of `first`'s tokens, then `second`'s; associative.

  `first` may be a state: its rows and position, with `restarted` false.
  """
  size = jax.tree.leaves(first.rows)[0].shape[2]
  before = jnp.where(second.restarted, 0, first.position)
  position = before + second.position
  token = window.held(position, size=size, sink_tokens=sink_tokens)
  # A token of `first` keeps its row, because its position is the same.
  token -= before[:, None]
  new = second.restarted[:, None] | (token >= 0)
  row = jnp.where(token >= 0, window.row_of(token, size, sink_tokens), size)

  def one(x, y):
    y = jnp.moveaxis(window.rows_at(y, row), 1, 2)
    return jnp.where(contract.expand(new[:, None], y), y, x)

  return _Summary(
    jax.tree.map(one, first.rows, second.rows),
    position,
    first.restarted | second.restarted,
  )


def _summarize(
  rows: Any,
  tokens: Any,
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  reset: tuple[Any, jax.Array],
  *,
  sink_tokens: int,
) -> _Summary:
  """Returns what the tokens of a call leave in an empty window.

  Args:
    rows: `[batch, heads, size, ...]` leaves, for their shapes.
    tokens: `[batch, time, heads, ...]` leaves.
    segment_ids: see `window.placement`.
    segment_id: `[batch]`, segment of the token before the call.
    reset: rows and position that new segments start from.
    sink_tokens: number of rows that keep the first tokens.
  """
  reset_rows, reset_position = reset
  empty = jax.tree.map(jnp.zeros_like, rows)
  where = window.placement(
    segment_ids,
    segment_id,
    jnp.zeros_like(segment_id),
    reset_position,
    time=jax.tree.leaves(tokens)[0].shape[1],
    size=jax.tree.leaves(rows)[0].shape[2],
    sink_tokens=sink_tokens,
    max_position=0,
  )
  return _Summary(
    window.advance(where, empty, reset_rows, window.join(where, empty, tokens)),
    where.next_position,
    where.restarted,
  )


def ids_before(
  axis: str, segment_id: jax.Array, segment_ids: jax.Array | None
) -> jax.Array:
  """Returns the segment `[batch]` before each shard's first token.

  Args:
    axis: mesh axis over which time is sharded.
    segment_id: `[batch]`, before the first shard's first token.
    segment_ids: `[batch, time]` of this shard, or None.
  """
  if segment_ids is None:
    later = contract.next_segment_id(segment_id)
    return jnp.where(lax.axis_index(axis) > 0, later, segment_id)
  none = jnp.zeros_like(segment_id)
  _, last = contract.segment_starts(segment_ids, none)
  earlier = scan_before(
    lambda first, second: jnp.where(second != 0, second, first),
    axis,
    last,
    none,
  )
  return jnp.where(earlier != 0, earlier, segment_id)


def of_last(tree: Any, axis: str) -> Any:
  """Returns the last shard's value on all shards."""
  last = lax.axis_index(axis) == lax.axis_size(axis) - 1
  return jax.tree.map(
    lambda x: lax.psum(jnp.where(last, x, jnp.zeros_like(x)), axis), tree
  )


def send(tree: Any, axis: str, distance: int) -> Any:
  """Sends each shard's value to the shard `distance` after it.

  A negative distance sends backwards. Returns what this shard receives, or
  zeros if no shard sends to it.
  """
  shards = lax.axis_size(axis)
  pairs = [
    (i, i + distance) for i in range(shards) if 0 <= i + distance < shards
  ]
  return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def where(condition: jax.Array, x: Any, y: Any) -> Any:
  """Selects one of two equal pytrees."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)
