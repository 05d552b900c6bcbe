"""A recurrence in chunk form: a scan over tiles with a gradient of its own.

What a memory brings (`Form`) is the algebra of one tile, its `step`, and how
its State is taken apart; layout, packing, hand-off and gradient are here. With
stale gradients one tile is one chunk of the paper; with gradients per token
the tile is free, and the result does not depend on it.

Chunks belong to sequences, not to the grid of the call: a state may arrive in
the middle of a chunk, and a packed segment starts a chunk wherever it starts.
Tokens are then laid into tiles by index, each chunk into a tile of its own.

The gradient is a reverse scan over tiles that recomputes each tile from its
start memory: only inputs and tile-start memories are kept.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.primitives import form as form_lib
from memcomp_kernels.primitives import tile_scan, tiles, triangular

Form, Memories, Parts = form_lib.Form, form_lib.Memories, form_lib.Parts
Operands, Result = form_lib.Operands, form_lib.Result

# Tokens between two saved states where a memory is scanned token by token.
SCAN_BLOCK = 32


class _Fixed(NamedTuple):
  """Integers of a call; `position` is None without chunks in the meaning."""

  position: jax.Array | None
  segment_id: jax.Array
  segment_ids: jax.Array | None


def _token_scan(form: Form, fixed: _Fixed, operands: Operands) -> Result:
  """The result by scanning tokens, checkpointed every few."""
  position, segment_id, segment_ids = fixed

  def state(memories, starts, position):
    if position is None:
      starts = None
    parts = Parts(memories, starts, position, segment_id)
    return form.put_together(parts)

  fresh = None if position is None else jnp.zeros_like(position)
  final, outputs = contract.scan(
    functools.partial(form.step, spec=form.spec),
    state(operands.memories, operands.chunk_start, position),
    operands.inputs,
    segment_ids=segment_ids,
    reset_state=state(operands.reset, operands.reset, fresh),
    block=SCAN_BLOCK,
  )
  parts = form.take_apart(final)
  starts = operands.chunk_start if parts.starts is None else parts.starts
  stats = None
  if form.solves:  # none are here
    stats = triangular.no_stats(parts.memories[0].shape[:2])
  return Result(parts.memories, starts, outputs, stats)


class _Plan(NamedTuple):
  """How a call is evaluated: `usual` if `use_usual` else `otherwise`.

  Each is a `tiles.Layout`, or None for the token scan; both give the same
  result. `use_usual` is None where `usual` always serves.
  """

  use_usual: jax.Array | None
  usual: Callable[[], tiles.Layout]
  otherwise: Callable[[], tiles.Layout | None]
  num_saved: int


def _position(fixed: _Fixed) -> jax.Array:
  """Tokens since the chunk started; without chunks every token starts one."""
  if fixed.position is None:
    return jnp.zeros_like(fixed.segment_id)
  return fixed.position


def _places(form: Form, fixed: _Fixed, time: int) -> tiles.Places:
  return tiles.places(
    fixed.segment_ids,
    fixed.segment_id,
    _position(fixed),
    time=time,
    chunk=form.tile_time,
  )


def _tiles_for_packing(whole: int) -> int:
  """Tiles reserved for packed rows that would fill `whole` tiles unpacked.

  A row may be cut into about a quarter as many segments as it has tiles before
  it is scanned by token instead: documents of four chunks on average.
  """
  return whole + max(whole // 4, 2)


def _plan(form: Form, fixed: _Fixed, time: int) -> _Plan:
  chunk = form.tile_time
  where = _places(form, fixed, time)
  indexed = functools.partial(
    tiles.indexed, where, _position(fixed), chunk=chunk
  )
  whole = -(-time // chunk)
  if fixed.segment_ids is None:
    return _Plan(
      # Without chunks in the meaning, tiles may start anywhere.
      use_usual=(
        None if fixed.position is None else jnp.all(fixed.position == 0)
      ),
      usual=lambda: tiles.aligned(chunk),
      otherwise=lambda: indexed(num_tiles=whole + 1),
      num_saved=whole,
    )
  # Every segment may leave a tile part empty. Rows cut into more segments than
  # this are scanned by token: exact as well, slower, and rare.
  num_tiles = _tiles_for_packing(whole)
  if num_tiles > time:
    num_tiles = time + 1
    return _Plan(
      use_usual=None,
      usual=lambda: indexed(num_tiles=num_tiles),
      otherwise=lambda: None,
      num_saved=num_tiles,
    )
  return _Plan(
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
def _chunk(form: Form, fixed: _Fixed, operands: Operands) -> Result:
  return _forward(form, fixed, operands, save=False)[0]


def _chunk_fwd(form: Form, fixed: _Fixed, operands: Operands):
  result, saved = _forward(form, fixed, operands, save=True)
  return result, (fixed, operands, saved)


def _forward(form: Form, fixed: _Fixed, operands: Operands, save: bool):
  """The result, and what is saved: of one shape whatever the layout."""
  engine = form.engine or tile_scan.ENGINE
  one = jax.eval_shape(functools.partial(engine.as_saved, form), operands)
  plan = _plan(form, fixed, form_lib.sizes(operands.inputs)[1])

  def run(layout, operands):
    if layout is None:
      result = _token_scan(form, fixed, operands)
      saved = jax.tree.map(
        lambda x: jnp.zeros((plan.num_saved, *x.shape), x.dtype), one
      )
      return result, saved if save else None
    result, saved = engine.forward(form, layout, operands, save)
    if not save:
      return result, None
    # One tile more than `num_saved` means that the first, whose memories came
    # in, is left out.
    extra = jax.tree.leaves(saved)[0].shape[0] - plan.num_saved
    return result, jax.tree.map(lambda x: x[extra:], saved)

  return _evaluate(plan, run, operands)


def _chunk_bwd(form: Form, residuals, cotangents):
  fixed, operands, saved = residuals
  engine = form.engine or tile_scan.ENGINE
  plan = _plan(form, fixed, form_lib.sizes(operands.inputs)[1])

  def run(layout, operands_):
    operands, saved, cotangents = operands_
    if layout is None:

      def scan(operands):
        return _token_scan(form, fixed, operands)._replace(stats=None)

      return jax.vjp(scan, operands)[1](cotangents)[0]
    if layout.flags is not None:
      missing = layout.flags.occupied.shape[0] - plan.num_saved
      if missing:
        saved = jax.tree.map(
          lambda first, rest: jnp.concatenate([first[None], rest]),
          engine.as_saved(form, operands),
          saved,
        )
    return engine.backward(form, layout, operands, saved, cotangents)

  cotangents = cotangents._replace(stats=None)
  return None, _evaluate(plan, run, (operands, saved, cotangents))


_chunk.defvjp(_chunk_fwd, _chunk_bwd)


def chunk(
  form: Form,
  state: Any,
  inputs: Any,
  *,
  segment_ids: jax.Array | None = None,
  reset_state: Any = None,
) -> tuple[Any, jax.Array]:
  """Equal to `contract.scan` of `form.step`, in chunk form.

  Args:
    form: the memory.
    state: before the first token.
    inputs: pytree of `[batch, time, heads, ...]` arrays.
    segment_ids: `[batch, time]`, 0 is padding; None for one segment.
    reset_state: what a new segment starts from; default `state`. Only its
      memories are read: a segment starts a chunk.

  Returns:
    The state after the last token, and outputs `[batch, time, heads, ...]`.
  """
  return run(
    form, state, inputs, segment_ids=segment_ids, reset_state=reset_state
  )[:2]


def run(
  form: Form,
  state: Any,
  inputs: Any,
  *,
  segment_ids: jax.Array | None = None,
  reset_state: Any = None,
) -> tuple[Any, jax.Array, triangular.Stats | None]:
  """As `chunk`; also returns how the systems of all tiles were solved."""
  parts = form.take_apart(state)
  # A memory of zeros must not be known as such to the compiler: on a CPU
  # the fused products of jaxlib 0.12.0.1 read memory that was never written
  # where one of several has a constant operand (tests/kernels/test_zero_state).
  parts = parts._replace(memories=lax.optimization_barrier(parts.memories))
  reset = parts if reset_state is None else form.take_apart(reset_state)
  operands = Operands(
    memories=parts.memories,
    chunk_start=parts.memories if parts.starts is None else parts.starts,
    reset=reset.memories,
    inputs=inputs,
  )
  fixed = _Fixed(parts.position, parts.segment_id, segment_ids)
  result = _chunk(form, fixed, operands)
  where = _places(form, fixed, form_lib.sizes(inputs)[1])
  starts, position = None, None
  if parts.position is not None:
    position = where.position
    # Between two chunks the start is the memory itself.
    starts = contract.batched_where(
      position == 0, result.memories, result.chunk_start
    )
  final = Parts(result.memories, starts, position, where.segment_id)
  return form.put_together(final), result.outputs, result.stats
