"""Softmax attention in tiles of queries, in plain JAX.

`window` joins the window's tokens and the call's tokens in one line without
padding. A tile of queries sees the line from one ring before it on, and the
sinks of the run that continues there. So cost and memory are linear in time. If
the ring is as long as the line, a tile sees the whole line up to its own part.
Each tile is recomputed for its gradient.

Tokens carry the run that they belong to (a segment within a row) and their
position in it. These alone determine what is seen, wherever a token lies.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, dispatch, window
from memcomp_kernels.softmax_attention import reference


class Entries(NamedTuple):
  """Keys and values, with their runs and positions.

  Attributes:
    key: `[batch, tokens, kv_heads, key]`.
    value: `[batch, tokens, kv_heads, value]`.
    run: int32 `[batch, tokens]`.
    position: int32 `[batch, tokens]`.
  """

  key: jax.Array
  value: jax.Array
  run: jax.Array
  position: jax.Array


# Least and greatest tokens per tile of a window. In between, a tile is about as
# long as the ring, so that it sees about as many tokens before it as it has.
_WINDOW_TILES = 32, 1024

# Maximum scores of one head and row in a tile of full attention, and the bounds
# of the tokens per tile that follow from it.
_SCORES = 2**21
_FULL_TILES = 32, 512

# Parts of a row whose queries see keys only up to the part's end. This avoids
# three quarters of the waste of the causal mask.
_CAUSAL_PARTS = 4


def window_tile(ring: int) -> int:
  """Returns tokens per tile if a token sees `ring` tokens."""
  low, high = _WINDOW_TILES
  return min(max(1 << (ring - 1).bit_length(), low), high)


def full_tile(keys: int) -> int:
  """Returns tokens per tile if each token sees all `keys`."""
  low, high = _FULL_TILES
  return min(max(_SCORES // keys, low), high)


def chunk(call: dispatch.Call) -> tuple[reference.State, jax.Array]:
  """Computes what `reference` does, in tiles; see `Op.chunk`."""
  state, inputs, spec, segment_ids = call[:4]
  reset_state, max_position = call.reset, call.max_position
  # New segments then start from a fresh state and inherit no tokens.
  fresh = max_position == 0 and call.reset_state is None
  where = window.placement_of(call, state.keys.shape[2])
  rows = state.keys, state.values
  reset_rows = reset_state.keys, reset_state.values
  joined = window.join(where, rows, (inputs.key, inputs.value))
  queries = window.compact(where, (inputs.query, inputs.sink_query))
  operands = queries, joined, rows, reset_rows

  # Both are checkpointed, so the gradient stores only the operands.
  @jax.checkpoint
  def usual(queries, joined, rows, reset_rows):
    del reset_rows
    return _attend(where, spec, queries, joined, rows, None)

  @jax.checkpoint
  def inheriting(queries, joined, rows, reset_rows):
    return _attend(where, spec, queries, joined, rows, reset_rows)

  if segment_ids is None or fresh:
    outputs = usual(*operands)
  else:
    outputs = lax.cond(where.inherits, inheriting, usual, *operands)
  keys, values = window.advance(where, rows, reset_rows, joined)
  state = reference.State(keys, values, where.next_position, where.segment_id)
  return state, window.restore(where, outputs)


def _attend(where, spec, queries, joined, rows, reset_rows):
  """Returns outputs of the call's tokens, in the order of `window.compact`."""
  time = queries[0].shape[1]
  keys, values = joined
  line = Entries(keys, values, where.run, where.position)
  queries += where.run[:, where.prior :], where.position[:, where.prior :]
  run = functools.partial(_tile, where, spec, reset_rows)
  size = window_tile(where.ring)
  back = -(-where.ring // size) * size
  if back < time:
    return _band(where, run, size, back, queries, line, rows, joined)

  # These are the sinks in the state; all others are in the line.
  kept = _sinks(where, rows, joined, jnp.zeros(1, jnp.int32))
  kept = jax.tree.map(lambda x: x[0], kept)
  size = min(full_tile(where.prior + time), time)
  tiles = -(-time // size)
  each = -(-tiles // _CAUSAL_PARTS) * size
  outputs = []
  for start in range(0, time, each):
    end = min(start + each, time)
    part = jax.tree.map(lambda x: x[:, start:end], queries)  # noqa: B023
    seen = jax.tree.map(lambda x: x[:, : where.prior + end], line)  # noqa: B023
    seen = _concatenate(kept, seen)
    one = functools.partial(run, tokens=seen)
    outputs.append(_over_tiles(one, size, end - start, part))
  return jnp.concatenate(outputs, axis=1)


def _band(where, run, size, back, queries, line, rows, joined):
  """Attends in tiles that see themselves and `back` tokens before them."""
  time = queries[0].shape[1]
  tiles = -(-time // size)
  spread = [(0, 0), (back - where.prior, tiles * size - time)]

  def slabs(x, empty):
    x = jnp.pad(x, spread + [(0, 0)] * (x.ndim - 2), constant_values=empty)
    blocks = contract.cut_time(x, size)
    shifted = [blocks[i : i + tiles] for i in range(back // size + 1)]
    return jnp.concatenate(shifted, axis=2)

  seen = Entries(
    slabs(line.key, 0),
    slabs(line.value, 0),
    slabs(line.run, window.PADDING),
    slabs(line.position, 0),
  )
  starts = where.prior - back + size * jnp.arange(tiles, dtype=jnp.int32)
  seen = jax.tree.map(
    lambda a, b: jnp.concatenate([a, b], axis=2),
    _sinks(where, rows, joined, starts),
    seen,
  )
  return _over_tiles(run, size, time, queries, seen)


def _sinks(where, rows, joined, starts) -> Entries:
  """Returns the sinks before given places: `[places, batch, sinks, ...]`."""
  (keys, values), exists, run = window.sinks(where, rows, joined, starts)
  run = jnp.where(exists, run[..., None], window.EMPTY)
  position = jnp.arange(where.sink_tokens, dtype=jnp.int32)
  position = jnp.broadcast_to(position, run.shape)
  tokens = Entries(keys, values, run, position)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)


def _tile(where, spec, reset_rows, query, sink_query, run, position, tokens):
  """Returns outputs of one tile of queries `[batch, size, ...]`."""
  same = run[:, :, None] == tokens.run[:, None]
  if reset_rows is not None:
    # These tokens were in the window of a segment that started in the call.
    reset = _held(where, reset_rows)
    started = (run > 0)[:, :, None] & (reset.run == 0)[:, None]
    tokens = _concatenate(reset, tokens)
    same = jnp.concatenate([started, same], axis=2)
  seen = same & sees(
    position[:, :, None], tokens.position[:, None], spec=spec, ring=where.ring
  )
  kv_heads = tokens.key.shape[2]
  query, sink_query = jax.tree.map(
    lambda x: by_group(x, kv_heads), (query, sink_query)
  )
  queries = seen.shape[1]
  seen = jnp.repeat(seen, query.shape[1] // queries, axis=1)
  outputs = attend(query, tokens, seen, spec=spec, sink_query=sink_query)
  return by_head(outputs, queries).astype(query.dtype)


def _held(where, rows) -> Entries:
  """Returns the tokens of the state that new segments start from."""
  position = window.held(
    where.reset_position, size=where.size, sink_tokens=where.sink_tokens
  )
  keys, values = (jnp.swapaxes(x, 1, 2) for x in rows)
  run = jnp.where(position >= 0, 0, window.EMPTY)
  return Entries(keys, values, run, position)


def _over_tiles(run, size, time, queries, *seen):
  """Maps `run` over tiles of the queries, with what each of them sees."""
  *query, runs, position = queries

  cut = (
    *jax.tree.map(lambda x: contract.cut_time(x, size), query),
    contract.cut_time(runs, size, window.PADDING),
    contract.cut_time(position, size),
    *seen,
  )
  one = jax.checkpoint(lambda x: run(*x), prevent_cse=False)
  outputs = jnp.moveaxis(lax.map(one, cut), 0, 1)
  outputs = outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])
  return outputs[:, :time]


def _concatenate(a: Entries, b: Entries) -> Entries:
  return jax.tree.map(
    lambda x, y: jnp.concatenate([x.astype(y.dtype), y], axis=1), a, b
  )


def sees(
  position: jax.Array, other: jax.Array, *, spec: reference.Spec, ring: int
) -> jax.Array:
  """Whether tokens at `position` see tokens of their run at `other`.

  Args:
    position: integers of any shape.
    other: integers that broadcast with them.
    spec: the attention's options.
    ring: number of rows of the window that are overwritten in turn.

  Returns:
    bool, of their common shape.
  """
  seen = (position - other < ring) | (other < spec.sink_tokens)
  if spec.chunk_size is not None and spec.window_size is not None:
    end_of_chunk = (position // spec.chunk_size + 1) * spec.chunk_size
    seen &= other >= end_of_chunk - spec.window_size
  return seen & (other <= position)


def attend(
  query: jax.Array,
  tokens: Entries,
  seen: jax.Array,
  *,
  spec: reference.Spec,
  sink_query: jax.Array | None = None,
) -> jax.Array:
  """Returns `[batch, queries, kv_heads, value]`, float32 or wider.

  Args:
    query: `[batch, queries, kv_heads, key]`, see `by_group`.
    tokens: all tokens that may be seen.
    seen: bool `[batch, queries, tokens]`. A query that sees nothing gets zeros.
    spec: the attention's options.
    sink_query: query for sinks, of the same shape; None for `query`.
  """
  dtype = query.dtype
  product = functools.partial(contract.product, dtype=dtype)
  scale = contract.read_scale(spec, query.shape[-1])
  scores = scale * product("bqhd,bkhd->bhqk", query, tokens.key)
  if sink_query is not None:
    of_sinks = scale * product("bqhd,bkhd->bhqk", sink_query, tokens.key)
    sinks = (tokens.position < spec.sink_tokens)[:, None, None]
    scores = jnp.where(sinks, of_sinks, scores)
  scores = jnp.where(seen[:, None], scores, -jnp.inf)
  # Places that only fill up a tile see nothing. nan there would reach the
  # adjoints of all values, because zero times nan is nan.
  top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
  # The division comes last: the sum is then over the weights that were
  # multiplied, and fewer numbers are divided.
  total = jnp.sum(weights, axis=-1)
  total = jnp.where(total == 0.0, 1.0, total)
  outputs = product("bhqk,bkhd->bqhd", weights, tokens.value)
  return outputs / jnp.swapaxes(total, 1, 2)[..., None]


def by_group(query: jax.Array, kv_heads: int) -> jax.Array:
  """Turns heads that share keys and values into more queries of one head.

  `[batch, queries, heads, dim]` becomes `[batch, queries * groups, kv_heads,
  dim]`, so that no key is repeated.
  """
  batch, queries, heads, dim = query.shape
  if heads == kv_heads:
    return query
  query = query.reshape(batch, queries, kv_heads, -1, dim)
  return jnp.swapaxes(query, 2, 3).reshape(batch, -1, kv_heads, dim)


def by_head(outputs: jax.Array, queries: int) -> jax.Array:
  """Undoes `by_group`: `[batch, queries, heads, dim]`."""
  batch, rows, kv_heads, dim = outputs.shape
  if rows == queries:
    return outputs
  outputs = outputs.reshape(batch, queries, -1, kv_heads, dim)
  return jnp.swapaxes(outputs, 2, 3).reshape(batch, queries, -1, dim)
