"""A window over the last tokens of a segment, kept in a ring buffer.

`rows` is any pytree of `[batch, heads, size, ...]` leaves (keys, values, ...).
`position` `[batch]` counts the tokens of the segment so far. The first
`sink_tokens` tokens (the attention sinks) stay in rows [0, sink_tokens). Every
later token p is stored in row sink_tokens + (p - sink_tokens) mod ring, where
ring = size - sink_tokens. So `position` alone determines which token a row
holds, and token p evicts token p - ring when it arrives.

A decode step calls `push`. A call of many tokens first calls `placement`, which
computes integers only. Then `join` concatenates the tokens of the ring and
those of the call into one line, oldest first, without padding. Within a
segment, a distance of indices in this line is a distance of positions, even if
padding lay between the tokens:

  token n attends to tokens (n - ring, n] of its run, and to the run's sinks
  token n evicts token n - ring, if that is in its run and is no sink

A run is a part of a row that belongs to one segment. Run 0 continues the
state's segment.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, derivative

PADDING = -1
"""The run of the empty places after a row's last token."""

EMPTY = -2
"""The run of the places for which the state held no token."""


def held(position: jax.Array, *, size: int, sink_tokens: int = 0) -> jax.Array:
  """Returns the position of the token in each row, or -1 for an empty row.

  Args:
    position: `[batch]`, tokens of the segment so far.
    size: number of rows.
    sink_tokens: number of rows that keep the first tokens.

  Returns:
    int32 `[batch, size]`.
  """
  row = jnp.arange(size, dtype=jnp.int32)
  newest = position[:, None] - 1
  latest = newest - (newest - row) % (size - sink_tokens)
  latest = jnp.where(row < sink_tokens, row, latest)
  return jnp.where((row <= newest) & (latest >= row), latest, -1)


def push(
  rows: Any, token: Any, position: jax.Array, *, sink_tokens: int = 0
) -> tuple[Any, Any, jax.Array]:
  """Writes one token. The caller increments `position`.

  Args:
    rows: `[batch, heads, size, ...]` leaves.
    token: `[batch, heads, ...]` leaves.
    position: `[batch]`, position of the token.
    sink_tokens: number of rows that keep the first tokens.

  Returns:
    The new rows; the evicted token, with leaves shaped like those of `token`;
    and bool `[batch]`, whether a token was evicted. If none was, the leaves
    hold what the row held.
  """
  size = jax.tree.leaves(rows)[0].shape[2]
  row = row_of(position, size, sink_tokens)
  batch = jnp.arange(position.shape[0])
  evicted = jax.tree.map(lambda x: x[batch, :, row], rows)
  rows = jax.tree.map(
    lambda x, new: x.at[batch, :, row].set(new.astype(x.dtype)), rows, token
  )
  # The barrier makes XLA write the rows once, before anything reads them.
  # Without it, XLA's fusions on a CPU write a copy of all rows for each reader.
  rows = jax.lax.optimization_barrier(rows)
  return rows, evicted, position >= size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """Where the tokens of a call belong. Places count along the joined line.

  Attributes:
    size: number of rows of the window.
    sink_tokens: how many of them keep the first tokens.
    prior: number of places for the ring's tokens; the call's tokens follow.
    source: `[batch, time]`, indices of the call's tokens without padding, and
      `time` after the last one. None if the call has no padding and one
      segment.
    place: `[batch, time]`, the inverse of `source`.
    run: `[batch, prior + time]`, the run of each place, counted from the
      state's segment; or `PADDING`, or `EMPTY`.
    position: `[batch, prior + time]`, position of each token in its segment.
    state_position: `[batch]`, position before the call.
    reset_position: `[batch]`, position where new segments start.
    tokens: `[batch]`, number of real tokens in the call.
    restarted: bool `[batch]`, whether a segment started in the call.
    inherits: bool scalar, whether a segment started with tokens in its window,
      that is with a `reset_position` other than 0.
    next_position: `[batch]`, position after the call.
    segment_id: `[batch]`, segment id after the call.
  """

  size: int = dataclasses.field(metadata={"static": True})
  sink_tokens: int = dataclasses.field(metadata={"static": True})
  prior: int = dataclasses.field(metadata={"static": True})
  source: jax.Array | None
  place: jax.Array | None
  run: jax.Array
  position: jax.Array
  state_position: jax.Array
  reset_position: jax.Array
  tokens: jax.Array
  restarted: jax.Array
  inherits: jax.Array
  next_position: jax.Array
  segment_id: jax.Array

  @property
  def ring(self) -> int:
    """Number of rows that are overwritten in turn."""
    return self.size - self.sink_tokens


def placement_of(call: Any, size: int) -> Placement:
  """The placement of a call with a window of `size` rows, sinks included.

  Args:
    call: a `dispatch.Call` whose state has a position, and whose Spec sinks.
    size: number of rows of the window.
  """
  state = call.state
  return placement(
    call.segment_ids,
    state.segment_id,
    state.position,
    call.reset.position,
    time=call.inputs.query.shape[1],
    size=size,
    sink_tokens=call.spec.sink_tokens,
    max_position=call.max_position,
  )


def placement(
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  position: jax.Array,
  reset_position: jax.Array,
  *,
  time: int,
  size: int,
  sink_tokens: int = 0,
  max_position: int | None = None,
) -> Placement:
  """Finds where the tokens of a call belong.

  Args:
    segment_ids: `[batch, time]`; 0 is padding. None means that all tokens
      continue the state's segment.
    segment_id: `[batch]`, segment of the state.
    position: `[batch]`, position of the state.
    reset_position: `[batch]`, position of the state that new segments start
      from.
    time: tokens per row.
    size: number of rows of the window.
    sink_tokens: number of rows that keep the first tokens.
    max_position: an upper bound of `position`, if one is known. There are then
      no places for tokens that cannot exist.
  """
  ring = size - sink_tokens
  prior = ring if max_position is None else min(ring, max_position)
  batch = position.shape[0]
  position, reset_position = position[:, None], reset_position[:, None]
  line = jnp.arange(time, dtype=jnp.int32)[None]
  if segment_ids is None:
    source = place = None
    tokens = jnp.full((batch, 1), time, jnp.int32)
    run = jnp.zeros((batch, time), jnp.int32)
    positions = position + line
    next_position = position + time
    next_id = contract.next_segment_id(segment_id)
  else:
    valid = segment_ids != 0
    tokens = jnp.sum(valid, axis=1, keepdims=True, dtype=jnp.int32)
    starts, next_id = contract.segment_starts(segment_ids, segment_id)
    rank = jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(valid, rank, time)
    rows = jnp.arange(batch)[:, None]
    source = jnp.full((batch, time), time, jnp.int32)
    source = source.at[rows, place].set(line, mode="drop")
    starts = contract.take(starts, source)
    run = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    first = jax.lax.cummax(jnp.where(starts, line, 0), axis=1)
    origin = jnp.where(run > 0, reset_position - first, position)
    positions = origin + line
    # After the last token, the origin is still that of the last segment.
    next_position = jnp.where(tokens > 0, origin[:, -1:] + tokens, position)
    run = jnp.where(line < tokens, run, PADDING)
  before = position - prior + jnp.arange(prior, dtype=jnp.int32)
  held_before = jnp.where(before >= sink_tokens, 0, EMPTY)
  restarted = jnp.any(run > 0, axis=1)
  return Placement(
    size=size,
    sink_tokens=sink_tokens,
    prior=prior,
    source=source,
    place=place,
    run=jnp.concatenate([held_before, run], axis=1),
    position=jnp.concatenate([before, positions], axis=1),
    state_position=position[:, 0],
    reset_position=reset_position[:, 0],
    tokens=tokens[:, 0],
    restarted=restarted,
    inherits=jnp.any(restarted & (reset_position[:, 0] > 0)),
    next_position=next_position[:, 0],
    segment_id=next_id,
  )


def compact(where: Placement, tokens: Any) -> Any:
  """Removes padding: `[batch, time, ...]`, with zeros after the last token."""
  if where.source is None:
    return tokens
  return jax.tree.map(lambda x: _move(x, where.source, where.place), tokens)


def restore(where: Placement, tokens: Any) -> Any:
  """Undoes `compact`: `[batch, time, ...]`, with zeros at padding."""
  if where.source is None:
    return tokens
  return jax.tree.map(lambda x: _move(x, where.place, where.source), tokens)


def join(where: Placement, rows: Any, tokens: Any) -> Any:
  """Puts the ring's tokens before the call's tokens.

  Args:
    where: placement of the call.
    rows: `[batch, heads, size, ...]`, rows of the state.
    tokens: `[batch, time, heads, ...]`, tokens of the call.

  Returns:
    `[batch, prior + time, heads, ...]` in the dtype of `tokens`, with zeros
    where `where.run` is `PADDING` or `EMPTY`.
  """
  row = row_of(where.position[:, : where.prior], where.size, where.sink_tokens)
  row = jnp.where(where.run[:, : where.prior] == EMPTY, where.size, row)

  def one(x, new):
    return jnp.concatenate([rows_at(x, row).astype(new.dtype), new], axis=1)

  return jax.tree.map(one, rows, compact(where, tokens))


def evicted(
  where: Placement, joined: Any, reset_rows: Any
) -> tuple[Any, jax.Array]:
  """Returns the token that each token of the call evicts.

  Args:
    where: placement of the call.
    joined: result of `join`.
    reset_rows: rows of the state that new segments start from.

  Returns:
    `[batch, time, heads, ...]` leaves, and bool `[batch, time]`, whether a
    token is evicted. Both are in the order of `compact`. The leaves are zeros
    where no token is evicted.
  """
  run = where.run[:, where.prior :]
  position = where.position[:, where.prior :] - where.ring
  exists = (run >= 0) & (position >= where.sink_tokens)
  inherited = exists & (run > 0) & (position < where.reset_position[:, None])
  time = run.shape[1]
  empty = min(where.ring - where.prior, time)

  def shifted(x):
    kept = exists & ~inherited
    x = jnp.pad(x[:, : time - empty], _left(x, empty))
    return jnp.where(contract.expand(kept, x), x, 0)

  tokens = jax.tree.map(shifted, joined)
  if where.source is None:
    return tokens, exists
  row = row_of(position, where.size, where.sink_tokens)
  row = jnp.where(inherited, row, where.size)

  def with_reset(tokens):
    return jax.tree.map(
      lambda x, r: x + rows_at(r, row).astype(x.dtype), tokens, reset_rows
    )

  return jax.lax.cond(where.inherits, with_reset, lambda x: x, tokens), exists


def sinks(
  where: Placement, rows: Any, joined: Any, place: jax.Array
) -> tuple[Any, jax.Array, jax.Array]:
  """Returns the sinks before given places, for the runs that continue there.

  At a place, at most one run that began before it continues. So a reader that
  sees the line only from that place on misses the sinks of that run alone. The
  result leaves out the sinks that a new segment's state brought; these are in
  `reset_rows`.

  Args:
    where: placement of the call.
    rows: `[batch, heads, size, ...]`, rows of the state.
    joined: result of `join`.
    place: int32 `[places]`; may be negative.

  Returns:
    `[batch, places, sink_tokens, heads, ...]` leaves; bool `[batch, places,
    sink_tokens]`, whether there is a sink; and `[batch, places]`, the runs.
  """
  at = jnp.clip(place, 0, where.run.shape[1] - 1)
  run = jnp.where(at < where.prior, 0, where.run[:, at])
  sink = jnp.arange(where.sink_tokens, dtype=jnp.int32)
  first = jnp.where(
    run > 0, where.reset_position[:, None], where.state_position[:, None]
  )
  in_call = sink >= first[..., None]
  kept = ~in_call & (run == 0)[..., None]
  source = (at - where.position[:, at])[..., None] + sink
  in_call &= (source < place[:, None]) & (run >= 0)[..., None]
  source = jnp.where(in_call, source, where.run.shape[1])
  row = jnp.where(kept, sink, where.size)
  flat, shape = (row.shape[0], -1), row.shape

  def one(x, line):
    found = contract.take(line, source.reshape(flat))
    found += rows_at(x, row.reshape(flat)).astype(line.dtype)
    return found.reshape(*shape, *line.shape[2:])

  return jax.tree.map(one, rows, joined), kept | in_call, run


def advance(where: Placement, rows: Any, reset_rows: Any, joined: Any) -> Any:
  """Returns the rows after the call; `where.next_position` belongs to them."""
  base = contract.batched_where(where.restarted, reset_rows, rows)
  base_position = jnp.where(
    where.restarted, where.reset_position, where.state_position
  )
  position = held(
    where.next_position, size=where.size, sink_tokens=where.sink_tokens
  )
  new = position >= base_position[:, None]
  end = where.prior + where.tokens - where.next_position
  source = jnp.where(new, end[:, None] + position, where.run.shape[1])

  def one(x, line):
    found = jnp.moveaxis(contract.take(line, source), 1, 2).astype(x.dtype)
    return jnp.where(contract.expand(new[:, None], found), found, x)

  return jax.tree.map(one, base, joined)


def row_of(position: jax.Array, size: int, sink_tokens: int) -> jax.Array:
  """Returns the row that stores the token at a position."""
  later = sink_tokens + (position - sink_tokens) % (size - sink_tokens)
  return jnp.where(position < sink_tokens, position, later)


def _left(x: jax.Array, count: int) -> list[tuple[int, int]]:
  return [(0, 0), (count, 0)] + [(0, 0)] * (x.ndim - 2)


def rows_at(x: jax.Array, row: jax.Array) -> jax.Array:
  """Gathers rows of a state's leaf as tokens: `[batch, rows, heads, ...]`."""
  return contract.take(jnp.moveaxis(x, 2, 1), row)


def _moved(x: jax.Array, source: jax.Array, back: jax.Array) -> jax.Array:
  """Applies `contract.take` with an index whose inverse is known."""
  del back
  return contract.take(x, source)


def _move_fwd(x, source, back):
  return contract.take(x, source), back


def _move_bwd(back, cotangent):
  # The transpose of a permutation is also a gather, so no scatter is needed.
  return contract.take(cotangent, back), None, None


_move = derivative.custom_vjp(_moved, _move_fwd, _move_bwd)
