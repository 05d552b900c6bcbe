"""Trellis by Pallas GPU kernels, forward and backward.

XLA lays out chunks as tiles of 64 tokens. A tile holds one chunk and empty
positions that change nothing, or several chunks (`TOGETHER`). Writes go from
tile to tile, and each pass of a head is independent (`writes`). Reads of all
tiles run in parallel (`reads`). Backward starts from the memories before each
tile and runs the reads first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.pallas_gpu import full_tiles, tile_kernel
from memcomp_kernels.trellis import reference, tile
from memcomp_kernels.trellis.pallas_gpu import (
  reads,
  reads_backward,
  writes,
  writes_backward,
)
from memcomp_kernels.trellis.pallas_gpu.tiles import (
  PASSES,
  Tiles,
  both,
  lanes,
  of_blocks,
  parted,
  passes,
  stacked,
  unstacked,
  widened,
)


def _forward(form, layout, operands, save):
  """Runs the forward pass; see `form.Engine`."""
  del save  # the kernels compute the saved arrays in any case
  laid = Tiles(form, layout, operands)
  given = laid.of_writes(operands)
  given["memory"] = lanes(both(*operands.memories), 1)
  if laid.flags is not None:
    given["reset_memory"] = lanes(both(*operands.reset), 1)
  written = writes.forward(given, form.spec, laid.block)
  given = laid.of_reads(written["saved"])
  given["u"] = stacked(passes(written["u"]))
  read = reads.forward(given, form.spec)
  output = read["output"][..., : laid.inputs.value.shape[-1]]
  memories = parted(passes(written["final"], 1), operands.memories)
  chunk_start = memories  # nobody reads this: a chunk ends with the call
  if laid.block is not None:
    chunk_start = operands.chunk_start
  elif laid.flags is not None:
    last = parted(passes(written["last_memory"], 1), operands.memories)
    chunk_start = layout_lib.where_last(layout, last, operands.chunk_start)
  result = form_lib.Result(
    memories,
    chunk_start,
    full_tiles.unlay(layout, output),
    None,
  )
  names = ("saved",) if laid.block is None else ("saved", "u")
  return result, {name: written[name] for name in names}


def _backward(form, layout, operands, saved, cotangents):
  """Runs the backward pass; see `form.Engine`."""
  laid = Tiles(form, layout, operands)
  inputs, like = laid.inputs, operands.memories
  by_reads = _backward_of_reads(laid, form, layout, operands, saved, cotangents)
  given = laid.of_writes(operands) | saved
  given |= {
    name: lanes(unstacked(by_reads[name])) for name in ("d_u", "d_memory")
  }
  given["d_final"] = lanes(both(*cotangents.memories), 1)
  if laid.continues:
    given["d_last_memory"] = lanes(both(*cotangents.chunk_start), 1)
  found = writes_backward.backward(given, form.spec, laid.block)

  def wide(x):
    return x.astype(jnp.float32)

  d_written = wide(unstacked(by_reads["d_written"]))
  d_written += wide(passes(found["d_written"]))
  d_key, d_value = parted(d_written, (inputs.key, inputs.value))
  d_log, d_rate = _gate_adjoints(laid, by_reads["d_gates"], found)
  d_inputs = reference.Inputs(
    query=by_reads["d_query"][..., : inputs.query.shape[-1]],
    key=d_key,
    value=d_value,
    target=jnp.sum(wide(passes(found["d_target"])), axis=3),
    log_decay=_of_gates(d_log, inputs.log_decay),
    write_rate=_of_gates(d_rate, inputs.write_rate),
  )
  d_inputs = jax.tree.map(
    lambda d, x: full_tiles.unlay(layout, d.astype(x.dtype)),
    d_inputs,
    inputs,
  )

  def memories(name):
    return parted(passes(found[name], 1), like)

  zeros = jax.tree.map(jnp.zeros_like, like)
  d_reset = zeros if laid.flags is None else memories("d_reset_memory")
  if laid.block is not None:
    d_start = cotangents.chunk_start
  elif laid.flags is None:
    d_start = zeros
  else:
    kept = layout_lib.kept(layout, cotangents.chunk_start)
    d_start = jax.tree.map(jnp.add, memories("d_start_memory"), kept)
  return form_lib.Operands(memories("d_first"), d_start, d_reset, d_inputs)


def _backward_of_reads(laid, form, layout, operands, saved, cotangents):
  """Returns the adjoints through the reads alone; see `reads_backward`."""
  given = laid.of_reads(saved["saved"])
  d_output = full_tiles.fill(layout_lib.lay(layout, cotangents.outputs))
  d_output = d_output.astype(given["query"].dtype)
  given["d_output"] = widened(d_output, laid.width)
  if laid.block is None:
    given["rates"] = stacked(laid.rate)
    given["target"] = laid.inputs.target
  else:
    given["u"] = stacked(passes(saved["u"]))
  if laid.continues:
    given["continues"] = laid.flags["continues"]
    given["start_memory"] = stacked(both(*operands.chunk_start), 1)
  return reads_backward.backward(given, form.spec, laid.block)


def _of_gates(d: jax.Array, like: jax.Array) -> jax.Array:
  """Undoes `of_passes` for the adjoint of gates `like`."""
  d = jnp.moveaxis(d, -2, -1)
  return d if like.shape[-1] > 1 else jnp.sum(d, axis=-1, keepdims=True)


def _gate_adjoints(
  laid: Tiles, by_reads: jax.Array, found: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Returns adjoints of log decays and rates, `[tiles, batch, heads, 2, tile]`.

  Each term of a read contains exp(log) of its token. Each term with a direction
  contains exp(-log) of the direction's token. What reaches the tile's end
  contains exp(log) of the last token. With gradients per token, each term of z
  contains exp(log) of the token before.

  Args:
    laid: Operands of the kernels.
    by_reads: Reads times their adjoints, `[tiles, batch, heads, 2 * tile]`.
    found: Results of `writes_backward`.
  """
  kinds = len(writes_backward.adjoint_kinds(laid.block))
  d_gates = passes(found["d_gates"])
  d_rate, by_end, *before = jnp.split(d_gates, kinds, axis=-1)
  kept = passes(jnp.sum(found["d_total"], axis=-1))
  at_end = laid.decay.total * kept - jnp.sum(laid.rate * by_end, axis=-1)
  d_log = unstacked(by_reads) - laid.rate * d_rate
  d_log = d_log.at[..., -1].add(at_end)
  if before:
    d_log += of_blocks(before.pop(), laid.block, _to_block_before)
  d_log = lax.cumsum(d_log, axis=4, reverse=True)
  return d_log, d_rate


def _to_block_before(x: jax.Array) -> jax.Array:
  """Sums blocks `[..., blocks, tokens]`; the sum goes to the block before.

  It is stored at the last token of that block.
  """
  found = jnp.sum(x, axis=-1)[..., 1:]  # no block is before the first one
  return jnp.zeros_like(x).at[..., :-1, -1].set(found)


def _as_saved(form, operands):
  """Converts memories to their saved form; see `form.Engine`."""
  memories = lanes(both(*operands.memories), 1)
  return {"saved": memories.astype(operands.inputs.query.dtype)}


ENGINE = form_lib.Engine(_forward, _backward, _as_saved)


def _together(form: form_lib.Form) -> form_lib.Form:
  """Returns the form with as many chunks per tile as fit; see `sweeps`.

  It then takes gradients as if per token, with each chunk as a block.
  """
  return dataclasses.replace(form, tile_time=full_tiles.TOKENS)


def _no_directions(form, operands, more: int) -> jax.Array:
  """Returns zeros in the shape of `u` of `_forward_together`."""
  batch, time = operands.inputs.query.shape[:2]
  count = -(-time // full_tiles.TOKENS) + more
  width = PASSES * operands.inputs.query.shape[2]
  shape = count, batch, width, full_tiles.TOKENS, form.spec.num_slots
  return jnp.zeros(shape, operands.inputs.query.dtype)


def _forward_together(form, layout, operands, save):
  """Runs the forward pass; see `form.Engine`.

  If chunks start with the call, several share a tile. The saved arrays have the
  same shapes either way. `saved` has room for one memory per chunk, of which
  the first ones are used. `u` is zeros where it is not used.
  """
  if layout.flags is not None:
    result, saved = _forward(form, layout, operands, save)
    return result, saved | {"u": _no_directions(form, operands, 1)}
  laid = dataclasses.replace(layout, chunk=full_tiles.TOKENS)
  result, saved = _forward(_together(form), laid, operands, save)
  # Nobody reads this chunk start: a chunk ends with the call.
  result = result._replace(chunk_start=result.memories)
  memories = saved["saved"]
  missing = layout.time // form.tile_time - memories.shape[0]
  widths = [(0, missing)] + [(0, 0)] * (memories.ndim - 1)
  return result, saved | {"saved": jnp.pad(memories, widths)}


def _backward_together(form, layout, operands, saved, cotangents):
  """Runs the backward pass; see `form.Engine`."""
  if layout.flags is not None:
    saved = {"saved": saved["saved"]}
    return _backward(form, layout, operands, saved, cotangents)
  saved = saved | {"saved": saved["saved"][: saved["u"].shape[0]]}
  laid = dataclasses.replace(layout, chunk=full_tiles.TOKENS)
  found = _backward(_together(form), laid, operands, saved, cotangents)
  zeros = jax.tree.map(jnp.zeros_like, found.chunk_start)
  return found._replace(chunk_start=zeros)


def _as_saved_together(form, operands):
  """Converts memories to their saved form; see `form.Engine`."""
  return _as_saved(form, operands) | {"u": _no_directions(form, operands, 0)[0]}


TOGETHER = form_lib.Engine(
  _forward_together, _backward_together, _as_saved_together
)
"""Engine whose tiles hold several chunks.

It does so if chunks start with the call and belong to one segment."""


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form that these kernels run."""
  form = tile.form(call)
  if not call.spec.chunked:
    return dataclasses.replace(form, tile_time=full_tiles.TOKENS, engine=ENGINE)
  engine = TOGETHER if _several(call) else ENGINE
  return dataclasses.replace(form, engine=engine)


def chunk(call: dispatch.Call) -> tuple:
  """Computes what `reference` does, by kernels; see `Op.chunk`."""
  return chunked.run(form(call), tile.bounded(call))


def _several(call: dispatch.Call) -> bool:
  """Whether several chunks fit in a tile, and chunks end with the call.

  The chunks of a tile must belong to one segment.
  """
  if call.segment_ids is not None:
    return False
  size, time = call.spec.chunk_size, call.inputs.query.shape[1]
  smaller = size < full_tiles.TOKENS and full_tiles.TOKENS % size == 0
  return smaller and time % size == 0


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := tile_kernel.unavailable():
    return reason
  inputs, spec = call.inputs, call.spec
  if spec.value_readout_phi:
    return "no kernel for value_readout_phi=True"
  if inputs.log_phi_eps is not None:
    return "no kernel for an eps of each token (log_phi_eps)"
  if reason := contract.wrong_dtypes(inputs, "bfloat16"):
    return reason
  allowed = writes
  widths: dict[str, tuple[int, tuple[int, ...]]] = {
    "key_dim": (inputs.query.shape[-1], allowed.DIMS),
    "value_dim": (inputs.value.shape[-1], allowed.DIMS),
    "num_slots": (spec.num_slots, allowed.SLOTS),
  }
  if reason := full_tiles.too_large(
    spec.chunk_size if spec.chunked else 1, widths
  ):
    return reason
  for name in ("key_dim", "value_dim"):
    size = spec.num_slots * widths[name][0]
    if size > allowed.LARGEST:
      return (
        f"num_slots={spec.num_slots} times {name}={widths[name][0]} is more"
        f" than {allowed.LARGEST}"
      )
  return None
