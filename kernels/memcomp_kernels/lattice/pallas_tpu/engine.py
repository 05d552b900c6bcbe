"""Lattice as Pallas TPU kernels, forward and backward.

`chunking.chunked` defines the layout in time, the packing and the passing of
state. One kernel per direction runs all tokens and keeps memories in VMEM. With
gradients at the chunk's start, a chunk's writes are matmuls (`chunk_start`).
With gradients per token they are not. The vector unit then computes each write,
with a pair of row and head on each lane (`pallas_tpu.pairs`). It also runs the
chunks and options that `chunk_start` does not support.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.lattice import reference, tile
from memcomp_kernels.lattice.pallas_tpu import call as call_lib
from memcomp_kernels.lattice.pallas_tpu import chunk_start as chunk_start_lib
from memcomp_kernels.lattice.pallas_tpu import plan as plan_lib
from memcomp_kernels.pallas_tpu import SUBLANES, launch, pairs
from memcomp_kernels.pallas_tpu.affine import engine


def _plan(
  spec: reference.Spec, inputs: reference.Inputs, tokens: int, *, flagged: bool
) -> plan_lib.Plan:
  """Returns the fastest plan that fits in VMEM.

  If none fits, it returns the plan that needs the least.
  """
  batch, _, heads, value_dim = inputs.value.shape
  plans = [
    plan_lib.Plan(
      spec=spec,
      lanes=lanes,
      rows=value_dim // lanes.parts,
      tokens=tokens,
      flagged=True,  # this needs more VMEM
    )
    for lanes in plan_lib.layouts(batch * heads, value_dim)
  ]
  fitting = [plan for plan in plans if not _too_large(plan, inputs)]
  plan = next(iter(fitting), min(plans, key=lambda plan: plan.rows))
  # With chunks, a tile must know whether its chunk is complete.
  return dataclasses.replace(plan, flagged=flagged or spec.chunked)


def _too_large(plan: plan_lib.Plan, inputs: reference.Inputs) -> str | None:
  """Returns why a plan's kernels do not fit in VMEM, or None if they fit."""
  needed = call_lib.needed(plan, inputs.query.dtype)
  return launch.too_large(needed, "lattice_backward", call_lib.FIX)


def _pack(
  plan: plan_lib.Plan, valid: jax.Array, inputs: reference.Inputs
) -> call_lib.Packed:
  """Lays out flat inputs `[batch, time, heads, ...]` for the kernels.

  `valid` is bool `[batch, time]`, whether there is a token.
  """
  lanes = plan.lanes
  query, key, value, log_decay, rate = (jnp.moveaxis(x, 2, 1) for x in inputs)
  decay = jnp.exp(log_decay.astype(jnp.float32))
  rate = rate.astype(jnp.float32)
  taken = jnp.broadcast_to(valid[:, None, :, None], rate.shape)
  rows = jnp.concatenate([decay, rate, taken.astype(jnp.float32)], -1)
  missing = plan_lib.ROWS - rows.shape[-1]
  rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, missing)])
  return call_lib.Packed(
    lanes.share(query), lanes.share(key), lanes.split(value), lanes.share(rows)
  )


def _pack_memory(lanes: pairs.Lanes, memory: jax.Array) -> jax.Array:
  """Packs `[batch, heads, value, slots]` as `[blocks, slots, rows, lanes]`."""
  return lanes.split(jnp.swapaxes(memory, -1, -2))


def _unpack_memory(
  lanes: pairs.Lanes, packed: jax.Array, batch: int
) -> jax.Array:
  return jnp.swapaxes(lanes.join(packed, batch), -1, -2)


def _flags(plan: plan_lib.Plan, layout: layout_lib.Layout):
  """Returns flags, `[blocks, tiles, FLAGS, LANES]`.

  The result is None if no tile is special.
  """
  if not plan.flagged:
    return None
  # The order is that of `plan.RESETS` and so on.
  x = jnp.stack([*layout_lib.tile_flags(layout).values()], -1).astype(
    jnp.float32
  )
  x = jnp.pad(x, [(0, 0), (0, 0), (0, plan_lib.FLAGS - x.shape[-1])])
  x = jnp.swapaxes(x, 0, 1)[:, None]  # [batch, 1, tiles, FLAGS]
  batch = layout.batch
  x = jnp.broadcast_to(x, (batch, plan.lanes.pairs // batch, *x.shape[2:]))
  return plan.lanes.share(x)


def prepare(form, layout, operands):
  """Returns the plan, packed operands, their pullback, and flags."""
  flat = layout_lib.flat(layout, operands.inputs)
  flagged = layout.flags is not None
  plan = _plan(form.spec, flat, form.tile_time, flagged=flagged)
  valid = jnp.swapaxes(layout_lib.valid(layout), 0, 1)
  pack = functools.partial(_pack, plan, valid.reshape(layout.batch, -1))
  packed, unpack = jax.vjp(pack, flat)
  return plan, packed, unpack, _flags(plan, layout)


def pack_memories(plan, operands):
  """Packs the memory, the memory that segments start from, and chunk starts."""
  return [
    _pack_memory(plan.lanes, x[0])
    for x in (operands.memories, operands.reset, operands.chunk_start)
  ]


def _forward(form, layout, operands, save):
  """Runs the forward pass; see `form.Engine`."""
  plan, packed, _, flags = prepare(form, layout, operands)
  batch = layout.batch
  memory, reset, chunk_start = pack_memories(plan, operands)
  found = call_lib.forward(
    plan, packed, flags, memory, reset, chunk_start, save
  )
  outputs = jnp.moveaxis(plan.lanes.join(found["output"], batch), 1, 2)
  outputs = layout_lib.unflat(layout, outputs)
  (start,) = operands.chunk_start
  if form.spec.chunked:
    last = _unpack_memory(plan.lanes, found["last"], batch)
    start = layout_lib.where_last(layout, last, start)
  final = _unpack_memory(plan.lanes, found["final"], batch)
  result = form_lib.Result((final,), (start,), outputs, None)
  return result, found["saved"] if save else None


def _backward(form, layout, operands, saved, cotangents):
  """Runs the backward pass; see `form.Engine`."""
  plan, packed, unpack, flags = prepare(form, layout, operands)
  batch = layout.batch
  d_output = jnp.moveaxis(layout_lib.flat(layout, cotangents.outputs), 2, 1)
  (d_final,), (d_chunk_start,) = cotangents.memories, cotangents.chunk_start
  _, reset, start = pack_memories(plan, operands)
  found = call_lib.backward(
    plan,
    packed,
    flags,
    saved,
    reset,
    start,
    plan.lanes.split(d_output),
    _pack_memory(plan.lanes, d_final),
    _pack_memory(plan.lanes, d_chunk_start),
  )
  d_packed = call_lib.Packed(
    *(found[f"d_{name}"] for name in call_lib.Packed._fields)
  )
  (d_inputs,) = unpack(d_packed)
  d_inputs = layout_lib.unflat(layout, d_inputs)

  def memory(name):
    if name not in found:
      return jnp.zeros_like(d_final)
    return _unpack_memory(plan.lanes, found[name], batch)

  d_start = d_chunk_start
  if form.spec.chunked:
    d_start = memory("d_start") + layout_lib.kept(layout, d_chunk_start)
  return form_lib.Operands(
    (memory("d_memory"),), (d_start,), (memory("d_reset"),), d_inputs
  )


def _as_saved(form, operands):
  """Converts memories to their saved form; see `form.Engine`."""
  (memory,) = operands.memories
  plan = _plan(form.spec, operands.inputs, form.tile_time, flagged=False)
  return _pack_memory(plan.lanes, memory)


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of Lattice that runs by these kernels."""
  form = dataclasses.replace(tile.form(call), engine=ENGINE)
  if call.spec.chunked:
    return form
  return dataclasses.replace(form, tile_time=form.tiling.kernel_time)


def tokens(
  form: form_lib.Form, inputs: reference.Inputs
) -> engine.Tokens | None:
  """Converts inputs to the tokens of `pallas_tpu.affine.engine`, or None.

  None means that `chunk_start` cannot run the call: columns are not normalised,
  gradients are per token, or chunks are too long.
  """
  spec = form.spec
  if not (spec.chunked and spec.unit_columns) or form.tile_time > LONGEST:
    return None
  log_decay = inputs.log_decay[..., 0]
  return engine.Tokens(
    query=inputs.query,
    key=inputs.key,
    value=inputs.value,
    log_decay=log_decay,
    rate=inputs.write_rate[..., 0],
    read="start",
    dtype=inputs.query.dtype,
    kernel=chunk_start_lib.kernel(spec),
  )


LONGEST = 128
"""Maximum tokens per chunk of `chunk_start`: arrays by two tokens fill
registers."""
ENGINE = engine.engine(tokens, form_lib.Engine(_forward, _backward, _as_saved))


def chunk(call: dispatch.Call) -> tuple:
  """Computes what `reference` does, by kernels; see `Op.chunk`."""
  return chunked.run(form(call), call)


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := launch.unavailable():
    return reason
  inputs, spec = call.inputs, call.spec
  if spec.sparsity:
    return f"no kernel for sparsity={spec.sparsity}, 0 alone"
  if reason := contract.wrong_dtypes(inputs, "bfloat16", "float32"):
    return reason
  kernel_form = form(call)
  if engine.serves(tokens, kernel_form, inputs):
    return None
  if spec.num_slots % SUBLANES:
    return f"num_slots={spec.num_slots} must be a multiple of {SUBLANES}"
  value_dim = inputs.value.shape[-1]
  if value_dim % SUBLANES:
    return f"value_dim={value_dim} must be a multiple of {SUBLANES}"
  plan = _plan(spec, inputs, kernel_form.tile_time, flagged=True)
  return _too_large(plan, inputs)
