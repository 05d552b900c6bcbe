"""Trellis in chunk form on matrix units, in plain JAX.

A scan over tiles (`tile.py` has their algebra). With stale gradients one tile
is one chunk of the paper; with gradients per token the tile is free, and the
result does not depend on it.

Chunks belong to sequences, not to the grid of the call: a state may arrive in
the middle of a chunk, and a packed segment starts a chunk wherever it starts.
Tokens are then laid into tiles by index, each chunk into a tile of its own.

The gradient is a reverse scan over tiles that recomputes each tile from its
start memory: only inputs and tile-start memories are kept.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.primitives import tiles
from memcomp_kernels.trellis import reference, tile, tilings, types

# Tokens between two saved states where Trellis is scanned token by token.
_SCAN_BLOCK = 32

Memories = tile.Memories


class _Operands(NamedTuple):
  """What `chunk` is differentiable in; memories are pairs (key, value)."""

  memories: Memories
  chunk_start: Memories
  reset: Memories
  inputs: types.Inputs


class _Result(NamedTuple):
  """What `chunk` computes; `chunk_start` is that of the last token's chunk."""

  memories: Memories
  chunk_start: Memories
  outputs: jax.Array


def _body(spec, reset, carry, laid):
  """Scan body over tiles; carry is (memories, start of the current chunk)."""
  memories, current_start = carry
  inputs, flags = laid
  if flags is None:
    starts = memories
  else:
    memories = contract.batched_where(flags.resets, reset, memories)
    starts = contract.batched_where(flags.continues, current_start, memories)
    current_start = contract.batched_where(
      flags.occupied, starts, current_start
    )
  memories, outputs = tile.run(memories, starts, inputs, spec)
  return (memories, starts if flags is None else current_start), outputs


def _tiles_forward(spec, layout, operands: _Operands):
  """Returns the result, and the memories before each tile."""
  laid = jax.tree.map(lambda x: tiles.lay(layout, x), operands.inputs)

  def body(carry, laid):
    new_carry, outputs = _body(spec, operands.reset, carry, laid)
    return new_carry, (outputs, carry[0])

  carry = operands.memories, operands.chunk_start
  carry, (outputs, before) = lax.scan(body, carry, (laid, layout.flags))
  time = operands.inputs.query.shape[1]
  return _Result(*carry, tiles.unlay(layout, outputs, time)), before


def _tiles_backward(spec, layout, operands: _Operands, before, cotangents):
  """Reverse scan over tiles, each recomputed from the memories before it."""
  laid = jax.tree.map(lambda x: tiles.lay(layout, x), operands.inputs)
  d_outputs = tiles.lay(layout, cotangents.outputs)

  def body(carry, x):
    d_carry, d_reset = carry
    memories, inputs, flags, d_outputs = x
    # Only a tile that continues a chunk reads the current chunk's start, and
    # that is always the start which was handed in.
    _, vjp = jax.vjp(
      lambda reset, carry, inputs: _body(spec, reset, carry, (inputs, flags)),
      operands.reset,
      (memories, operands.chunk_start),
      inputs,
    )
    d_reset_tile, d_carry, d_inputs = vjp((d_carry, d_outputs))
    if flags is not None:
      d_reset = jax.tree.map(jnp.add, d_reset, d_reset_tile)
    return (d_carry, d_reset), d_inputs

  d_carry = cotangents.memories, cotangents.chunk_start
  d_reset = jax.tree.map(jnp.zeros_like, operands.reset)
  (d_carry, d_reset), d_inputs = lax.scan(
    body,
    (d_carry, d_reset),
    (before, laid, layout.flags, d_outputs),
    reverse=True,
  )
  time = operands.inputs.query.shape[1]
  d_inputs = jax.tree.map(lambda x: tiles.unlay(layout, x, time), d_inputs)
  d_memories, d_chunk_start = d_carry
  return _Operands(d_memories, d_chunk_start, d_reset, d_inputs)


def _token_scan(spec, position, segment_id, segment_ids, operands: _Operands):
  """The result by scanning tokens, checkpointed every few."""

  def state(memories, chunk_start, position):
    if not spec.stale:
      chunk_start, position = (None, None), None
    return _state(memories, chunk_start, position, segment_id)

  final, outputs = contract.scan(
    functools.partial(reference.step, spec=spec),
    state(operands.memories, operands.chunk_start, position),
    operands.inputs,
    segment_ids=segment_ids,
    reset_state=state(operands.reset, operands.reset, jnp.zeros_like(position)),
    block=_SCAN_BLOCK,
  )
  memories = final.key_memory, final.value_memory
  if final.position is None:
    return _Result(memories, operands.chunk_start, outputs)
  chunk_start = final.key_memory_start, final.value_memory_start
  return _Result(memories, chunk_start, outputs)


class _Plan(NamedTuple):
  """How a call is evaluated: `usual` if `use_usual` else `otherwise`.

  Each is a `tiles.Layout`, or None for the token scan; both give the same
  result. `use_usual` is None where `usual` always serves.
  """

  where: tiles.Places
  use_usual: jax.Array | None
  usual: Callable[[], tiles.Layout]
  otherwise: Callable[[], tiles.Layout | None]
  num_saved: int


def _plan(spec, position, segment_id, segment_ids, time) -> _Plan:
  chunk = tilings.tile_time(spec)
  where = tiles.places(
    segment_ids, segment_id, position, time=time, chunk=chunk
  )
  indexed = functools.partial(tiles.indexed, where, position, chunk=chunk)
  whole = -(-time // chunk)
  if segment_ids is None:
    return _Plan(
      where,
      # Without chunks in the meaning, tiles may start anywhere.
      use_usual=jnp.all(position == 0) if spec.stale else None,
      usual=lambda: tiles.aligned(chunk),
      otherwise=lambda: indexed(num_tiles=whole + 1),
      num_saved=whole,
    )
  # Every segment may leave a tile part empty. Rows cut into more segments than
  # this are scanned by token: exact as well, slower, and rare.
  num_tiles = tilings.tiles_for_packing(whole)
  if num_tiles > time:
    num_tiles = time + 1
    return _Plan(
      where,
      use_usual=None,
      usual=lambda: indexed(num_tiles=num_tiles),
      otherwise=lambda: None,
      num_saved=num_tiles,
    )
  return _Plan(
    where,
    use_usual=where.needed <= num_tiles,
    usual=lambda: indexed(num_tiles=num_tiles),
    otherwise=lambda: None,
    num_saved=num_tiles,
  )


def _evaluate(plan: _Plan, run: Callable, operands):
  """Runs `run(layout, operands)` with the layout that the plan selects."""

  def usual(operands):
    return run(plan.usual(), operands)

  def otherwise(operands):
    return run(plan.otherwise(), operands)

  if plan.use_usual is None:
    return usual(operands)
  return lax.cond(plan.use_usual, usual, otherwise, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunk(spec, position, segment_id, segment_ids, operands: _Operands):
  return _chunk_fwd(spec, position, segment_id, segment_ids, operands)[0]


def _chunk_fwd(spec, position, segment_id, segment_ids, operands):
  time = operands.inputs.query.shape[1]
  plan = _plan(spec, position, segment_id, segment_ids, time)

  def run(layout, operands):
    if layout is None:
      result = _token_scan(spec, position, segment_id, segment_ids, operands)
      saved = jax.tree.map(
        lambda x: jnp.zeros((plan.num_saved, *x.shape), x.dtype),
        operands.memories,
      )
      return result, saved
    result, before = _tiles_forward(spec, layout, operands)
    # What is saved has one shape whatever the layout: one tile more than
    # `num_saved` means that the first, whose memories came in, is left out.
    extra = jax.tree.leaves(before)[0].shape[0] - plan.num_saved
    return result, jax.tree.map(lambda x: x[extra:], before)

  result, saved = _evaluate(plan, run, operands)
  return result, (position, segment_id, segment_ids, operands, saved)


def _chunk_bwd(spec, residuals, cotangents):
  position, segment_id, segment_ids, operands, saved = residuals
  time = operands.inputs.query.shape[1]
  plan = _plan(spec, position, segment_id, segment_ids, time)

  def run(layout, operands_):
    operands, saved, cotangents = operands_
    if layout is None:
      scan = functools.partial(
        _token_scan, spec, position, segment_id, segment_ids
      )
      return jax.vjp(scan, operands)[1](cotangents)[0]
    if layout.flags is not None:
      missing = layout.flags.occupied.shape[0] - plan.num_saved
      if missing:
        saved = jax.tree.map(
          lambda first, rest: jnp.concatenate([first[None], rest]),
          operands.memories,
          saved,
        )
    return _tiles_backward(spec, layout, operands, saved, cotangents)

  d_operands = _evaluate(plan, run, (operands, saved, cotangents))
  return None, None, None, d_operands


_chunk.defvjp(_chunk_fwd, _chunk_bwd)


def chunk(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
) -> tuple[types.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `api.chunk`."""
  reset_state = state if reset_state is None else reset_state
  chunk_start, position = _chunk_start(state)
  operands = _Operands(
    memories=(state.key_memory, state.value_memory),
    chunk_start=chunk_start,
    reset=(reset_state.key_memory, reset_state.value_memory),
    inputs=inputs,
  )
  result = _chunk(spec, position, state.segment_id, segment_ids, operands)
  where = tiles.places(
    segment_ids,
    state.segment_id,
    position,
    time=inputs.query.shape[1],
    chunk=tilings.tile_time(spec),
  )
  if state.position is None:
    chunk_start, position = (None, None), None
  else:
    position = where.position
    # Between two chunks the start is the memory itself.
    chunk_start = contract.batched_where(
      position == 0, result.memories, result.chunk_start
    )
  state = _state(result.memories, chunk_start, position, where.segment_id)
  return state, result.outputs


def _chunk_start(state: types.State) -> tuple[Memories, jax.Array]:
  """The start of the current chunk, and the tokens since."""
  key_start, value_start = state.key_memory_start, state.value_memory_start
  if state.position is None or key_start is None or value_start is None:
    # Gradients per token: there is no chunk, every token starts one.
    memories = state.key_memory, state.value_memory
    return memories, jnp.zeros_like(state.segment_id)
  return (key_start, value_start), state.position


def _state(memories, chunk_start, position, segment_id) -> types.State:
  key_memory, value_memory = memories
  key_start, value_start = chunk_start
  return types.State(
    key_memory, value_memory, key_start, value_start, position, segment_id
  )
