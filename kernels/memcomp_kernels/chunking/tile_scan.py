"""Runs tiles with `lax.scan` and recomputes each one for its gradient."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.math import solver


def _body(form: form_lib.Form, resets, carry, laid):
  """Runs one tile, as the body of the scan over tiles.

  Args:
    form: the memory.
    resets: the memories that new segments start from, and the start of their
      chunk.
    carry: the memories, and the start of the current chunk.
    laid: inputs, and facts about the tile.
  """
  reset, reset_start = resets
  memories, current_start = carry
  inputs, complete, flags = laid
  if flags is None:
    starts = memories
  else:
    memories = contract.batched_where(flags.resets, reset, memories)
    starts = contract.batched_where(flags.continues, current_start, memories)
    if reset_start is not None:
      starts = contract.batched_where(flags.resets, reset_start, starts)
    current_start = contract.batched_where(
      flags.occupied, starts, current_start
    )
  memories, outputs, stats = form.run_tile(
    memories, starts, inputs, complete, form.spec, form.tiling
  )
  carry = memories, starts if flags is None else current_start
  return carry, (outputs, stats)


def prepare(form: form_lib.Form, inputs: Any) -> Any:
  """Returns what tiles get for `inputs` `[tiles, batch, heads, ...]`."""
  if form.prepare is None:
    return inputs
  return jax.vmap(lambda x: form.prepare(x, form.spec, form.tiling))(inputs)


def lay(
  layout: layout_lib.Layout, operands: form_lib.Operands
) -> tuple[Any, jax.Array, layout_lib.Flags | None]:
  """Returns the inputs in tiles, which tiles are complete, and their flags."""
  laid = jax.tree.map(lambda x: layout_lib.lay(layout, x), operands.inputs)
  batch, time = form_lib.sizes(operands.inputs)
  return laid, layout_lib.complete(layout, batch, time), layout.flags


def forward(
  form: form_lib.Form,
  layout: layout_lib.Layout,
  operands: form_lib.Operands,
  save: bool,
) -> tuple[form_lib.Result, form_lib.Memories]:
  """Returns the result, and the memories before each tile."""

  def body(carry, laid):
    new_carry, results = _body(form, resets, carry, laid)
    return new_carry, (*results, carry[0])

  carry = operands.memories, operands.chunk_start
  resets = operands.reset, operands.reset_start
  inputs, *laid = lay(layout, operands)
  laid = prepare(form, inputs), *laid
  carry, (outputs, stats, before) = lax.scan(body, carry, laid)
  _, time = form_lib.sizes(operands.inputs)
  outputs = layout_lib.unlay(layout, outputs, time)
  if stats is not None:
    stats = solver.total(stats)
  return form_lib.Result(*carry, outputs, stats), before


def backward(
  form: form_lib.Form, layout, operands: form_lib.Operands, before, cotangents
):
  """Scans tiles in reverse and recomputes each from the memories before it."""
  d_outputs = layout_lib.lay(layout, cotangents.outputs)
  resets = operands.reset, operands.reset_start
  inputs, *laid = lay(layout, operands)
  prepared, unprepare = jax.vjp(lambda x: prepare(form, x), inputs)

  def body(carry, x):
    d_carry, d_resets = carry
    memories, (inputs, complete, flags), d_outputs = x

    # Only a tile that continues a chunk reads the start of the current chunk.
    # That start is always the one that was passed into the call.
    def tile(resets, carry, inputs):
      laid = inputs, complete, flags
      carry, (outputs, stats) = _body(form, resets, carry, laid)
      return (carry, outputs), stats

    _, vjp, _ = jax.vjp(
      tile,
      resets,
      (memories, operands.chunk_start),
      inputs,
      has_aux=True,
    )
    d_resets_tile, d_carry, d_inputs = vjp((d_carry, d_outputs))
    if flags is not None:
      d_resets = jax.tree.map(jnp.add, d_resets, d_resets_tile)
    return (d_carry, d_resets), d_inputs

  d_carry = cotangents.memories, cotangents.chunk_start
  d_resets = jax.tree.map(jnp.zeros_like, resets)
  (d_carry, d_resets), d_inputs = lax.scan(
    body,
    (d_carry, d_resets),
    (before, (prepared, *laid), d_outputs),
    reverse=True,
  )
  (d_inputs,) = unprepare(d_inputs)
  _, time = form_lib.sizes(operands.inputs)
  d_inputs = jax.tree.map(lambda x: layout_lib.unlay(layout, x, time), d_inputs)
  d_memories, d_chunk_start = d_carry
  d_reset, d_reset_start = d_resets
  return form_lib.Operands(
    d_memories, d_chunk_start, d_reset, d_inputs, d_reset_start
  )


ENGINE = form_lib.Engine(
  forward, backward, lambda form, operands: operands.memories
)
