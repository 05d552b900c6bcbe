"""Trellis as Pallas TPU kernels, forward and backward.

`chunking.chunked` defines the layout, the packing and the passing of state. One
kernel per direction runs the tokens of all chunks and keeps the memories of
several heads in VMEM from chunk to chunk. Queries, keys, values and outputs
keep their memory layout, `[batch, time, heads * dim]`. Targets come as `[batch,
heads * slots, time]`, which a projection can emit directly. Memories are halved
and have their heads side by side.

With gradients per token (`substitution`), targets come by token. A grid step
then takes several rows of the batch, because it processes one token after the
other and needs many heads at once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.pallas_tpu import activations, launch
from memcomp_kernels.trellis import reference, tile, tilings
from memcomp_kernels.trellis.pallas_tpu import call as call_lib
from memcomp_kernels.trellis.pallas_tpu import plan as plan_lib

# The separable form is used up to this sum of -log_decay in a chunk; beyond it,
# the form would in time overflow. exp(40) times any value in use is far from
# float32's maximum. Its inverse is far from what is flushed to zero.
SEPARABLE_RANGE = 40.0


def _plan(
  form: form_lib.Form, inputs: reference.Inputs, direction: str, num_chunks: int
) -> plan_lib.Plan:
  """Returns a kernel's plan without the final choice of `safe`.

  The default sizes shrink until the blocks fit in VMEM. If the smallest do not,
  they are the plan's.

  Args:
    form: The memory.
    inputs: Inputs of a call.
    direction: "forward" or "backward".
    num_chunks: Chunks per row.
  """
  given = getattr(form.tiling, direction)
  kind, token = launch.device_kind(), not form.spec.chunked
  default = tilings.kernel(direction, kind, token=token)
  plan = None
  for tiling in [given] if given else default.smaller():
    plan = _plan_of(form, inputs, tiling, num_chunks)
    if not _too_large(plan, inputs, direction):
      break
  assert plan is not None
  return plan


def _too_large(
  plan: plan_lib.Plan, inputs: reference.Inputs, direction: str
) -> str | None:
  """Returns why a plan's kernel does not fit in VMEM, or None if it fits."""
  dtypes = inputs.query.dtype, inputs.target.dtype
  needed = call_lib.needed(plan, direction, *dtypes)
  return launch.too_large(needed, f"trellis_{direction}", call_lib.FIX)


def _plan_of(
  form: form_lib.Form,
  inputs: reference.Inputs,
  tiling: tilings.KernelTiling,
  num_chunks: int,
) -> plan_lib.Plan:
  """Returns the plan of a kernel of the given sizes; see `_plan`."""
  spec = form.spec
  heads, key_dim = inputs.query.shape[2:]
  value_dim = inputs.value.shape[-1]
  token = not spec.chunked
  tile = form.tile_time if token else None
  unit = plan_lib.unit(spec, heads, key_dim, value_dim, tile)
  units = heads // unit.heads
  if token:
    sizes = tiling.token_sizes(units, inputs.query.shape[0], unit)
  else:
    sizes = tiling.sizes(units, num_chunks, unit.tokens)
  kind = plan_lib.PerTokenPlan if token else plan_lib.ChunkStartPlan
  return kind(
    unit=unit,
    **sizes,
    phi=spec.phi,
    phi_eps=spec.phi_eps if inputs.log_phi_eps is None else None,
    read=spec.read_activation,
    read_eps=spec.read_eps,
    safe=token,
    first_order=spec.first_order,
    shared=inputs.log_decay.shape[-1] == inputs.write_rate.shape[-1] == 1,
  )


def _reads_start(plan: plan_lib.Plan) -> bool:
  return call_lib.writes(plan).READS_START


def _pad_chunks(x: jax.Array, plan: plan_lib.Plan) -> jax.Array:
  """Pads `[batch, time, ...]` with empty positions up to a whole grid step."""
  return contract.pad_time(x, plan.unit.tokens * plan.chunks)


def _pack(plan: plan_lib.Plan, spec: reference.Spec, inputs: reference.Inputs):
  """Lays out flat inputs `[batch, time, heads, ...]` for the kernels."""
  unit = plan.unit

  def by_token(x):
    return x.reshape(*x.shape[:2], -1)

  def rows(x):  # [batch, time, heads] to [batch, units, chunks, lanes]
    batch, time, heads = x.shape
    x = x.astype(jnp.float32)
    x = x.reshape(batch, time // unit.tokens, unit.tokens, -1, unit.heads)
    x = jnp.transpose(x, (0, 3, 1, 4, 2))
    return x.reshape(batch, heads // unit.heads, -1, unit.lanes)

  target = by_token(inputs.target)
  log_decay = inputs.log_decay
  gates = {}
  scale = -activations.rate_scale(plan.phi, unit.slots)
  for p in (0,) if plan.shared else (0, 1):
    log = rows(log_decay[..., p % log_decay.shape[-1]])
    by_head = log.reshape(*log.shape[:-1], unit.heads, unit.tokens)
    own = by_head
    by_head = jnp.cumsum(by_head, axis=-1)
    gates[f"prev{p}"] = (by_head - own).reshape(log.shape)
    end = jnp.broadcast_to(by_head[..., -1:], by_head.shape)
    gates[f"log{p}"], gates[f"end{p}"] = (
      x.reshape(log.shape) for x in (by_head, end)
    )
    rate = inputs.write_rate
    gates[f"rate{p}"] = scale * rows(rate[..., p % rate.shape[-1]])
  if inputs.log_phi_eps is not None:
    gates["eps"] = rows(jnp.exp(inputs.log_phi_eps[..., 0].astype(jnp.float32)))
  writes = call_lib.writes(plan)
  lanes = writes.lay_lanes(plan, gates)
  none = jnp.zeros_like(gates["log0"])
  gates = [gates.get(name, none) for name in plan.row_names]
  return call_lib.Packed(
    by_token(inputs.query),
    by_token(inputs.key),
    by_token(inputs.value),
    writes.lay_target(target),
    jnp.stack(gates, axis=3),
    lanes,
  )


def _pack_memories(unit: plan_lib.UnitSizes, memories: Any) -> Any:
  """Halves `[batch, heads, slots, dim]`, to `[batch, units, slots, width]`."""

  def pack(x):
    batch, heads, slots, dim = x.shape
    x = x.reshape(batch, heads // unit.heads, unit.heads, slots, dim)
    x = jnp.swapaxes(x, 2, 3)
    return 0.5 * x.reshape(batch, heads // unit.heads, slots, -1)

  return jax.tree.map(pack, memories)


def _unpack_memories(
  unit: plan_lib.UnitSizes, packed: Any, scale: float
) -> Any:
  """Converts back to `[batch, heads, slots, dim]` and multiplies by `scale`."""

  def unpack(x):
    batch, units, slots, _ = x.shape
    x = x.reshape(batch, units, slots, unit.heads, -1)
    x = jnp.swapaxes(x, 2, 3)
    return scale * x.reshape(batch, units * unit.heads, slots, -1)

  return jax.tree.map(unpack, packed)


def _flags(layout: layout_lib.Layout, plan):
  """Returns `layout.bits`, or None if no chunk is special for the kernel."""
  if layout.flags is None and not _reads_start(plan):
    return None
  return layout_lib.bits(layout, plan.chunks)


def _by_range(plan, form, packed, run):
  """Calls `run(plan)`, separable if every chunk's decay is within the range."""
  safe = dataclasses.replace(plan, safe=True)
  if plan.safe or not form.spec.forget_gate or form.tiling.decay == "separable":
    return run(plan)
  if form.tiling.decay == "safe":
    return run(safe)
  ends = [i for i, name in enumerate(plan.row_names) if name.startswith("end")]
  lowest = jnp.min(packed.rows[..., jnp.array(ends), :])
  return lax.cond(
    lowest >= -SEPARABLE_RANGE, lambda: run(plan), lambda: run(safe)
  )


def _prepare(form, layout, operands, direction):
  """Returns the plan, packed operands, their pullback, flags, and chunks."""
  flat = layout_lib.flat(layout, operands.inputs)
  num_chunks = flat.query.shape[1] // form.tile_time
  plan = _plan(form, flat, direction, num_chunks)
  flat = jax.tree.map(lambda x: _pad_chunks(x, plan), flat)
  packed, unpack = jax.vjp(functools.partial(_pack, plan, form.spec), flat)
  return plan, packed, unpack, _flags(layout, plan), num_chunks


def _forward(form, layout, operands, save):
  """Runs the forward pass; see `form.Engine`."""
  plan, packed, _, flags, num_chunks = _prepare(
    form, layout, operands, "forward"
  )
  memories, reset, start = (
    _pack_memories(plan.unit, x)
    for x in (operands.memories, operands.reset, operands.chunk_start)
  )
  results = _by_range(
    plan,
    form,
    packed,
    lambda plan: call_lib.forward(
      plan, packed, flags, memories, reset, start, save
    ),
  )
  outputs = results["output"][:, : num_chunks * plan.unit.tokens]
  outputs = outputs.reshape(layout.batch, -1, *operands.inputs.value.shape[2:])
  final = _unpack_memories(plan.unit, results["final"], 2.0)
  chunk_start = final  # not read: a chunk ends with the call, or none does
  if flags is not None and _reads_start(plan):
    last = _unpack_memories(plan.unit, results["last"], 2.0)
    chunk_start = layout_lib.where_last(layout, last, operands.chunk_start)
  saved = None
  if save:
    saved = jax.tree.map(lambda x: x[:num_chunks], results["saved"])
  result = form_lib.Result(
    final, chunk_start, layout_lib.unflat(layout, outputs), None
  )
  return result, saved


def _backward(form, layout, operands, saved, cotangents):
  """Runs the backward pass; see `form.Engine`."""
  plan, packed, unpack, flags, _ = _prepare(form, layout, operands, "backward")
  unit = plan.unit
  d_output = _pad_chunks(layout_lib.flat(layout, cotangents.outputs), plan)
  # The packed arrays are halves, and the caller's memories are twice the
  # kernel's. The factor 4 makes up for both.
  doubled = jax.tree.map(
    lambda x: 4.0 * x,
    _pack_memories(unit, (cotangents.memories, cotangents.chunk_start)),
  )
  start = _pack_memories(unit, operands.chunk_start)
  missing = packed.query.shape[1] // unit.tokens - saved[0].shape[0]
  saved = jax.tree.map(
    lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), saved
  )
  adjoints = {
    "output": d_output.reshape(*d_output.shape[:2], -1),
    "final": doubled[0],
    "chunk_start": doubled[1],
  }
  results = _by_range(
    plan,
    form,
    packed,
    lambda plan: call_lib.backward(plan, packed, flags, saved, start, adjoints),
  )
  d_packed = call_lib.Packed(
    *(results.get(f"d_{name}") for name in call_lib.Packed._fields)
  )
  (d_inputs,) = unpack(d_packed)
  d_inputs = layout_lib.unflat(layout, d_inputs)
  d_memories = _unpack_memories(unit, results["d_memories"], 0.5)
  if flags is None:
    zeros = jax.tree.map(jnp.zeros_like, d_memories)
    return form_lib.Operands(d_memories, zeros, zeros, d_inputs)
  d_reset = _unpack_memories(unit, results["d_reset"], 0.5)
  if not _reads_start(plan):
    zeros = jax.tree.map(jnp.zeros_like, d_memories)
    return form_lib.Operands(d_memories, zeros, d_reset, d_inputs)
  d_start = jax.tree.map(
    jnp.add,
    _unpack_memories(unit, results["d_start"], 0.5),
    layout_lib.kept(layout, cotangents.chunk_start),
  )
  return form_lib.Operands(d_memories, d_start, d_reset, d_inputs)


def _as_saved(form, operands):
  """Converts memories to their saved form; see `form.Engine`."""
  plan = _plan(form, operands.inputs, "forward", 1)
  packed = _pack_memories(plan.unit, operands.memories)
  return jax.tree.map(lambda x: x.astype(operands.inputs.query.dtype), packed)


ENGINE = form_lib.Engine(_forward, _backward, _as_saved)


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form that these kernels run."""
  form, spec = dataclasses.replace(tile.form(call), engine=ENGINE), call.spec
  if spec.chunked:
    return form
  (heads, key_dim), value = call.inputs.query.shape[2:], call.inputs.value
  unit = plan_lib.unit(
    spec, heads, key_dim, value.shape[-1], form.tiling.tile_time
  )
  return dataclasses.replace(form, tile_time=unit.tokens)


def chunk(call: dispatch.Call) -> tuple:
  """Computes what `reference` does, by kernels; see `Op.chunk`."""
  return chunked.run(form(call), tile.bounded(call))


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := launch.unavailable():
    return reason
  inputs, spec = call.inputs, call.spec
  if spec.value_readout_phi:
    return "no kernel for value_readout_phi=True"
  if reason := contract.wrong_dtypes(inputs, "bfloat16", "float32"):
    return reason
  heads, key_dim = inputs.query.shape[2:]
  value_dim = inputs.value.shape[-1]
  if reason := plan_lib.unsupported(spec, heads, key_dim, value_dim):
    return reason
  made = form(call)
  # No layout has more chunks.
  num_chunks = layout_lib.page_tiles(inputs.query.shape[1], made.tile_time)
  for direction in ("forward", "backward"):
    plan = _plan(made, inputs, direction, num_chunks)
    if reason := _too_large(plan, inputs, direction):
      return reason
  return None
