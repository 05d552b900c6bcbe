"""A recurrence in chunk form: a scan over tiles with a custom gradient.

A memory defines the algebra of one tile and the fields of its State that tiles
change (`Form`). This module handles layout, packing, the state between tiles,
and the gradient. With chunk-start gradients one tile is one chunk of the paper.
With gradients per token the tile size is free and does not change the result.

Chunks belong to sequences and are not aligned to the call. A state may arrive
in the middle of a chunk. A packed segment starts a chunk at its first token, or
continues the chunk that its reset state is inside of. Tokens are then gathered
into tiles by index, so that each chunk has a tile of its own. Tiles of packed
rows run in pages (see `pages`).

The gradient is a reverse scan over tiles, which recomputes each tile from the
memory at its start. Only inputs, the tokens' places and the memories at tile
starts are stored.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, derivative, dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.chunking import pages as pages_lib
from memcomp_kernels.math import solver

Form, Memories = form_lib.Form, form_lib.Memories
Operands, Result = form_lib.Operands, form_lib.Result


def _by_start(form: Form, where: layout_lib.Places, run: Callable, operands):
  """Runs `run(layout, operands)` for rows that hold one segment."""
  (batch, time), chunk = where.tile.shape, form.tile_time

  def aligned(operands):
    return run(layout_lib.Layout(batch, time, chunk), operands)

  def indexed(operands):
    num_tiles = -(-time // chunk) + 1
    layout = layout_lib.indexed(where, chunk=chunk, num_tiles=num_tiles)
    return run(layout, operands)

  if where.before is None:
    return aligned(operands)
  return lax.cond(jnp.all(where.before == 0), aligned, indexed, operands)


def _engine(form: Form, where: layout_lib.Places) -> form_lib.Engine:
  if form.engine is None:
    return form_lib.ENGINE
  # Kernels assume that segments start with a chunk.
  return _guarded(form.engine, where.inside)


def _guarded(
  engine: form_lib.Engine, failed: jax.Array | None
) -> form_lib.Engine:
  """Returns an engine of kernels, which the XLA form replaces if `failed`.

  Args:
    engine: engine of the kernels, which has no second derivative.
    failed: bool, whether the kernels do not support the call. None if they
      certainly support it.
  """

  def forward(form, layout, operands, save):
    operands = derivative.only_first(operands)
    result, saved = engine.forward(form, layout, operands, save)
    if failed is not None:
      result = form_lib.forward_or_again(failed, form, layout, operands, result)
    return result, saved

  def backward(form, layout, operands, saved, cotangents):
    operands, cotangents = derivative.only_first((operands, cotangents))

    def by_kernel():
      return engine.backward(form, layout, operands, saved, cotangents)

    if failed is None:
      return form_lib.filled(by_kernel(), operands)
    return form_lib.backward_or_again(
      failed, form, layout, operands, cotangents, by_kernel
    )

  return form_lib.Engine(forward, backward, engine.as_saved)


def _run(form: Form, where: layout_lib.Places, operands: Operands) -> Result:
  return _forward(form, where, operands, save=False)[0]


def _chunk_fwd(form: Form, where: layout_lib.Places, operands: Operands):
  result, saved = _forward(form, where, operands, save=True)
  outputs, saved = derivative.saved((result.outputs, saved))
  return result._replace(outputs=outputs), (where, operands, saved)


def _forward(
  form: Form, where: layout_lib.Places, operands: Operands, save: bool
):
  """Returns the result and the saved memories, of one shape in all layouts."""
  engine = _engine(form, where)
  if where.starts is not None:
    pages = pages_lib.cut(where, form.tile_time)
    return pages_lib.forward(form, engine, pages, operands, save)

  def run(layout, operands):
    result, saved = engine.forward(form, layout, operands, save)
    if not save:
      return result, None
    # The indexed layout has one tile more than the aligned layout. Its first
    # tile is left out, because the memories before it are an argument.
    first = layout.flags is not None
    return result, jax.tree.map(lambda x: x[first:], saved)

  return _by_start(form, where, run, operands)


def _chunk_bwd(form: Form, residuals, cotangents):
  where, operands, saved = residuals
  engine = _engine(form, where)
  cotangents = cotangents._replace(stats=None)
  if where.starts is not None:
    pages = pages_lib.cut(where, form.tile_time)
    d = pages_lib.backward(form, engine, pages, operands, saved, cotangents)
    return None, d

  def run(layout, given):
    operands, saved, cotangents = given
    if layout.flags is not None:
      saved = jax.tree.map(
        lambda first, rest: jnp.concatenate([first[None], rest]),
        engine.as_saved(form, operands),
        saved,
      )
    return engine.backward(form, layout, operands, saved, cotangents)

  given = operands, saved, cotangents
  return None, _by_start(form, where, run, given)


_chunk = derivative.custom_vjp(_run, _chunk_fwd, _chunk_bwd, (0,))


def _memories(form: Form, state: Any) -> Memories:
  return tuple(getattr(state, name) for name in form.memories)


def _chunk_start(form: Form, state: Any) -> Memories:
  """Returns the memories at the start of the current chunk.

  Between two chunks these are the current memories.
  """
  memories = _memories(form, state)
  if not form.starts:
    return memories
  starts = tuple(
    jax.tree.map(jnp.zeros_like, memory)
    if name is None
    else getattr(state, name)
    for name, memory in zip(form.starts, memories, strict=True)
  )
  return contract.batched_where(state.position == 0, memories, starts)


def run(
  form: Form, call: dispatch.Call
) -> tuple[Any, jax.Array, solver.Stats | None]:
  """Computes what the memory's `reference` does, in chunk form.

  Args:
    form: the memory.
    call: the call, with state and inputs as the form has them. If its reset
      state is inside a chunk, a segment's first tokens continue that chunk.

  Returns:
    The state after the last token; outputs `[batch, time, heads, ...]`; and
    the statistics of `math.solver` over all tiles, None if it solved nothing.
  """
  # The compiler must not know that a memory is zeros. On a CPU, the fused
  # products of jaxlib 0.12.0.1 read memory that was never written if one of
  # several has a constant operand (tests/kernels/test_zero_state).
  memories = lax.optimization_barrier(_memories(form, call.state))
  inputs, segment_ids = call.inputs, call.segment_ids
  state = call.state._replace(**dict(zip(form.memories, memories, strict=True)))
  reset = state if call.reset_state is None else call.reset_state
  operands = Operands(
    memories=memories,
    chunk_start=_chunk_start(form, state),
    reset=_memories(form, reset),
    # It is stored for the gradient, so it is set only if segments may begin.
    reset_start=None if segment_ids is None else _chunk_start(form, reset),
    inputs=inputs,
  )
  where = layout_lib.places(
    segment_ids,
    state.segment_id,
    getattr(state, "position", None),
    getattr(reset, "position", None),
    time=jax.tree.leaves(inputs)[0].shape[1],
    chunk=form.tile_time,
  )
  result = _chunk(form, where, operands)
  new: dict[str, Any] = {"segment_id": where.segment_id}
  if where.before is not None:
    new["position"] = where.position
  if form.starts:
    # Between two chunks the chunk start is the memory itself.
    starts = contract.batched_where(
      where.position == 0, result.memories, result.chunk_start
    )
    new |= {k: v for k, v in zip(form.starts, starts, strict=True) if k}
  new |= dict(zip(form.memories, result.memories, strict=True))
  return state._replace(**new), result.outputs, result.stats


def implementation(
  form: Callable[[dispatch.Call], Form],
) -> Callable[..., tuple]:
  """Returns the implementation of an op that consists of a chunk form only.

  Args:
    form: the call -> the memory's form.

  Returns:
    The function that `Op.chunk` calls. It takes an engine that runs the tiles
    in place of the form's own, as kernels provide.
  """

  def chunk(
    call: dispatch.Call, engine: form_lib.Engine | None = None
  ) -> tuple:
    """Computes what `reference` does, in chunk form; see `Op.chunk`."""
    made = form(call)
    if engine is not None:
      made = dataclasses.replace(made, engine=engine)
    return run(made, call)

  return chunk
