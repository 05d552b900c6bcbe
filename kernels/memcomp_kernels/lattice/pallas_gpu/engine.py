"""Lattice by Pallas GPU kernels, forward and backward.

The kernels are for normalised columns and gradients at the chunk's start.
Whether the decays could be factored is known only afterwards. If they could
not, the XLA form computes the call again.
"""

import dataclasses

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.lattice import reference, tile
from memcomp_kernels.lattice.pallas_gpu import backward, forward
from memcomp_kernels.lattice.pallas_gpu import chunk as chunk_lib
from memcomp_kernels.pallas_gpu import full_tiles, tile_kernel


def _turned(memories: form_lib.Memories) -> jax.Array:
  """Makes the slots of a memory its rows, or converts back."""
  return jnp.swapaxes(memories[0], -1, -2)


def _prepare(form: form_lib.Form, layout: layout_lib.Layout, operands):
  """Returns the operands that both kernels read, and flags or None."""
  inputs = layout_lib.lay(layout, operands.inputs)
  inputs = jax.tree.map(full_tiles.fill, inputs)
  log_decay = inputs.log_decay[..., 0].astype(jnp.float32)
  given = {name: getattr(inputs, name) for name in ("query", "key", "value")}
  rate = inputs.write_rate[..., 0].astype(jnp.float32)
  given |= {"log_decay": log_decay, "rate": rate}
  flags = full_tiles.flags(layout)
  if flags is not None:
    given |= flags | {"start_memory": _turned(operands.chunk_start)}
  return given, flags


def _forward(form, layout, operands, save):
  """Runs the forward pass; see `form.Engine`."""
  given, flags = _prepare(form, layout, operands)
  given["memory"] = _turned(operands.memories)
  start = operands.chunk_start
  if flags is not None:
    given["reset_memory"] = _turned(operands.reset)
  found = forward.forward(given, form.spec, save)
  if flags is not None:
    last = (_turned((found["last_memory"],)),)
    start = layout_lib.where_last(layout, last, start)
  outputs = full_tiles.unlay(layout, found["output"])
  result = form_lib.Result((_turned((found["final"],)),), start, outputs, None)
  # Written such that NaN also counts as failed.
  failed = ~(jnp.min(found["lowest"]) >= form_lib.LOWEST_SUM)
  result = form_lib.forward_or_again(failed, form, layout, operands, result)
  if not save:
    return result, None
  num_tiles = found["saved"].shape[0]
  return result, (found["saved"], jnp.broadcast_to(failed, num_tiles))


def _backward(form, layout, operands, saved, cotangents):
  """Runs the backward pass; see `form.Engine`."""
  memories, failed = saved
  return form_lib.backward_or_again(
    jnp.any(failed),
    form,
    layout,
    operands,
    cotangents,
    lambda: _by_kernel(form, layout, operands, memories, cotangents),
  )


def _by_kernel(form, layout, operands, saved, cotangents) -> form_lib.Operands:
  """Returns the adjoints of all operands."""
  given, flags = _prepare(form, layout, operands)
  d_output = full_tiles.fill(layout_lib.lay(layout, cotangents.outputs))
  given |= {
    "saved": saved,
    "d_output": d_output.astype(given["value"].dtype),
    "d_final": _turned(cotangents.memories),
  }
  if flags is not None:
    given["d_last_memory"] = _turned(cotangents.chunk_start)
  found = backward.backward(given, form.spec)
  d_inputs = reference.Inputs(
    query=found["d_query"],
    key=found["d_key"],
    value=found["d_value"],
    log_decay=found["d_log_decay"][..., None],
    write_rate=found["d_rate"][..., None],
  )
  d_inputs = jax.tree.map(
    lambda d, x: full_tiles.unlay(layout, d.astype(x.dtype)),
    d_inputs,
    operands.inputs,
  )
  d_memory = (_turned((found["d_memory"],)),)
  zeros = jax.tree.map(jnp.zeros_like, d_memory)
  if flags is None:
    return form_lib.Operands(d_memory, cotangents.chunk_start, zeros, d_inputs)
  (kept,) = layout_lib.kept(layout, cotangents.chunk_start)
  d_start = (_turned((found["d_start_memory"],)) + kept,)
  d_reset = (_turned((found["d_reset_memory"],)),)
  return form_lib.Operands(d_memory, d_start, d_reset, d_inputs)


def _as_saved(form, operands):
  """Converts memories to their saved form; see `form.Engine`."""
  memory = _turned(operands.memories)
  return memory.astype(operands.inputs.query.dtype), jnp.zeros((), bool)


ENGINE = form_lib.Engine(_forward, _backward, _as_saved)


def chunk(call: dispatch.Call) -> tuple:
  """Computes what `reference` does, by kernels; see `Op.chunk`."""
  form = dataclasses.replace(tile.form(call), engine=ENGINE)
  return chunked.run(form, call)


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := tile_kernel.unavailable():
    return reason
  inputs, spec = call.inputs, call.spec
  if not spec.chunked:
    return "no kernel for gradients per token"
  if not spec.unit_columns:
    return f"no kernel for update={spec.update!r}, 'normalized' alone"
  if spec.sparsity:
    return f"no kernel for sparsity={spec.sparsity}, 0 alone"
  if reason := contract.wrong_dtypes(inputs, "bfloat16"):
    return reason
  return full_tiles.too_large(
    spec.chunk_size,
    {
      "value_dim": (inputs.value.shape[-1], chunk_lib.DIMS),
      "num_slots": (spec.num_slots, chunk_lib.SLOTS),
    },
  )
