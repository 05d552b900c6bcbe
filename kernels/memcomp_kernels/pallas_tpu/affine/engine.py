"""Engines that run affine memories with the TPU kernels over tokens.

The kernels read tokens in the memory layout of the inputs. A memory converts
its inputs to `Tokens`. Another engine runs calls whose inputs or sizes do not
fit these kernels.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.math import decay
from memcomp_kernels.pallas_tpu import LANES, launch
from memcomp_kernels.pallas_tpu.affine import call, chunk_start, delta, outer
from memcomp_kernels.pallas_tpu.affine import plan as plan_lib

STEP_HEADS, STEP_TOKENS = 12, 256
"""Maximum heads and tokens per grid step.

They were chosen by static cycle counts (docs/tpu-kernels.md)."""


class Tokens(NamedTuple):
  """What a memory reads and writes, token by token.

  Attributes:
    query: Queries, `[batch, time, groups, key]`, in the dtype of products.
    key: Keys, shape and dtype of `query`. The heads of a group share its
      queries and keys; all groups have the same number of heads.
    value: Values, `[batch, time, heads, value]`.
    log_decay: Log decays, `[batch, time, heads]`, <= 0; 0 at empty positions.
    rate: Rates of writes, `[batch, time, heads]`, >= 0; 0 at empty positions.
    read: Which writes a token reads; see `plan.Plan`.
    dtype: Dtype of outputs.
    skip: Factor with which the value is added to the output, shaped as `rate`;
      None if it is not added.
    erase: Whether a token first removes what its key reads.
    scale: Factor of outputs; 1 unless `erase`.
    kernel: What computes a tile; None for a kernel of this folder, chosen by
      `read` and `erase`.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  log_decay: jax.Array
  rate: jax.Array
  read: str
  dtype: Any
  skip: jax.Array | None = None
  erase: bool = False
  scale: float = 1.0
  kernel: plan_lib.TileKernel | None = None


OfMemory = Callable[[form_lib.Form, Any], Tokens | None]
"""Maps (form, inputs `[batch, time, ...]`) to Tokens.

The result is None if the kernels cannot run such a memory."""


def _is_power_of_2(x: int) -> bool:
  return x & (x - 1) == 0


def plan_of(
  of_memory: OfMemory, form: form_lib.Form, inputs: Any, direction: str
) -> plan_lib.Plan | None:
  """Returns the plan of a kernel, or None if the kernels do not fit the call.

  Either both kernels run a call or none does, because what the forward kernel
  saves has the kernels' layout.
  """
  tokens = of_memory(form, inputs)
  if tokens is None:
    return None
  plans = {
    way: _plan(tokens, form.tile_time, inputs.query.shape[1], way)
    for way in ("forward", "backward")
  }
  return None if None in plans.values() else plans[direction]


def _kernel(tokens: Tokens) -> plan_lib.TileKernel:
  if tokens.kernel:
    return tokens.kernel
  if tokens.read == "start":
    return chunk_start.KERNEL
  return delta.KERNEL if tokens.erase else outer.KERNEL


def _plan(
  tokens: Tokens, tile: int, time: int, direction: str
) -> plan_lib.Plan | None:
  """Returns the plan of one kernel, as large as it fits in VMEM, or None."""
  heads, value_dim = tokens.value.shape[2:]
  groups, key_dim = tokens.key.shape[2:]
  if not all(map(_is_power_of_2, (tile, key_dim, value_dim))) or tile < 16:
    return None

  def fills(count, of, width):  # whether blocks fill lanes, or are whole
    return count == of or count * width % LANES == 0

  shared = heads // groups
  within = heads if shared == 1 else shared
  # Heads that fill lanes by value and, if each has its own key, by key.
  unit = next(
    (
      n
      for n in (1, 2, 4, 8, 16)
      if within % n == 0
      and fills(n, heads, value_dim)
      and (shared > 1 or fills(n, heads, key_dim))
    ),
    None,
  )
  if unit is None:
    return None
  most = min(max(1, STEP_TOKENS // tile), -(-time // tile))
  kernel = _kernel(tokens)
  if kernel.step_tiles:
    most = min(most, kernel.step_tiles[direction == "backward"])

  def fits(step_heads):
    if heads % step_heads or (shared % step_heads and step_heads % shared):
      return False
    return fills(max(1, step_heads // shared), groups, key_dim)

  multiples = range(max(STEP_HEADS, unit) // unit * unit, 0, -unit)
  for step_heads in filter(fits, multiples):
    for step_tiles in range(most, 0, -1):
      plan = plan_lib.Plan(
        heads=heads,
        shared=shared,
        key_dim=key_dim,
        value_dim=value_dim,
        tile=tile,
        read=tokens.read,
        dtype=tokens.dtype,
        erase=tokens.erase,
        scale=tokens.scale,
        skip=tokens.skip is not None,
        unit=unit,
        step_units=step_heads // unit,
        step_tiles=step_tiles,
        two_parts=tokens.query.dtype == jnp.float32,
        kernel=kernel,
      )
      needed = call.needed(plan, direction, tokens.query.dtype)
      if needed <= launch.LIMIT:
        return plan
  return None


def serves(of_memory: OfMemory, form: form_lib.Form, inputs: Any) -> bool:
  """Returns whether these kernels, not the other engine, run a call."""
  return plan_of(of_memory, form, inputs, "forward") is not None


def _pack(plan: plan_lib.Plan, tokens: Tokens) -> dict[str, jax.Array]:
  """Lays out tokens, a whole number of grid steps, for the kernels."""
  batch, time = tokens.query.shape[:2]
  sizes = plan.steps, plan.step_units, plan.unit
  tiled = batch, time // plan.step_tokens, plan.step_tiles, plan.tile, *sizes

  def by_tile(x):
    return x.astype(jnp.float32).reshape(tiled)

  log_decay, rate = by_tile(tokens.log_decay), by_tile(tokens.rate)
  gates = {"log_decay": log_decay, "rate": rate}
  if not plan.kernel.factors_decays:
    b = decay.running_sums(log_decay, axis=3)
    end = jax.tree.map(lambda x: x[:, :, :, -1:], b)
    gates |= {
      "write": jnp.exp(end.minus(b)) * rate,
      "total": jnp.exp(end.total),
    }
    a = b if plan.read == "after" else decay.sums_before(log_decay, axis=3)
    for name, sums in (("a", a), ("b", b)):
      gates[name] = sums.fine if plan.two_parts else sums.total
      gates[f"{name}_coarse"] = sums.coarse
  if plan.skip:
    gates["skip"] = by_tile(tokens.skip)

  def rows(name, x):
    # [batch, steps of heads, of time, tiles, units, heads, tokens]
    x = jnp.transpose(x, (0, 4, 1, 2, 5, 6, 3))
    if name == "total":
      x = jnp.broadcast_to(x, (*x.shape[:-1], plan.value_dim))
    x = x.reshape(*x.shape[:3], plan.step_tiles * plan.step_units, -1)
    free = plan.gate_rows - x.shape[3]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, free), (0, 0)])

  arrays = {"query": tokens.query, "key": tokens.key, "value": tokens.value}
  arrays = {name: x.reshape(batch, time, -1) for name, x in arrays.items()}
  return arrays | {name: rows(name, gates[name]) for name in plan.gates}


def pack_memory(plan: plan_lib.Plan, x: jax.Array) -> jax.Array:
  """Converts memories to `[batch, units, key, unit * value]`.

  They come as `[batch, heads, key, value]`, or as `[batch, heads, value, key]`
  if the kernel factors decays.
  """
  if plan.kernel.factors_decays:
    x = jnp.swapaxes(x, 2, 3)
  batch, _, key_dim, _ = x.shape
  x = x.reshape(batch, plan.units, plan.unit, key_dim, -1)
  return jnp.swapaxes(x, 2, 3).reshape(batch, plan.units, key_dim, -1)


def _unpack_memory(plan: plan_lib.Plan, x: jax.Array) -> jax.Array:
  batch, units, key_dim, _ = x.shape
  x = x.reshape(batch, units, key_dim, plan.unit, -1)
  x = jnp.swapaxes(x, 2, 3).reshape(batch, plan.heads, key_dim, -1)
  return jnp.swapaxes(x, 2, 3) if plan.kernel.factors_decays else x


def _flags(layout: layout_lib.Layout, plan):
  """Returns `layout.bits`, or None if no tile is special for the kernel."""
  if layout.flags is None and plan.read != "start":
    return None
  return layout_lib.bits(layout, plan.step_tiles)


def prepare(of_memory: OfMemory, plan, form, layout, inputs):
  """Returns the packed tokens, their pullback, and the flags."""

  def pack(inputs):
    flat = layout_lib.flat(layout, inputs)
    flat = jax.tree.map(lambda x: contract.pad_time(x, plan.step_tokens), flat)
    tokens = of_memory(form, flat)
    assert tokens is not None  # because there is a plan
    return _pack(plan, tokens)

  packed, unpack = jax.vjp(pack, inputs)
  return packed, unpack, _flags(layout, plan)


def _num_tiles(layout: layout_lib.Layout) -> int:
  if layout.flags is None:
    return -(-layout.time // layout.chunk)
  return layout.flags.resets.shape[0]


def _forward(of_memory, other, form, layout, operands, save):
  """Runs the forward pass; see `form.Engine`."""
  inputs = operands.inputs
  plan = plan_of(of_memory, form, inputs, "forward")
  if plan is None:
    return other.forward(form, layout, operands, save)
  packed, _, flags = prepare(of_memory, plan, form, layout, inputs)
  memory, reset, start = (
    pack_memory(plan, x)
    for (x,) in (operands.memories, operands.reset, operands.chunk_start)
  )
  found = call.forward(
    plan,
    packed,
    memory,
    flags=flags,
    reset=reset,
    chunk_start=start,
    save=save,
  )
  if flags is not None and not plan.inner:
    start = layout_lib.where_last(layout, found["last"], start)
  num_tiles = _num_tiles(layout)
  outputs = found["output"][:, : num_tiles * plan.tile]
  outputs = outputs.reshape(layout.batch, -1, plan.heads, plan.value_dim)
  result = form_lib.Result(
    (_unpack_memory(plan, found["final"]),),
    (_unpack_memory(plan, start),),
    layout_lib.unflat(layout, outputs),
    None,
  )
  saved = (found["saved"][:num_tiles],) if save else ()
  if plan.kernel.factors_decays:
    # Written such that NaN also counts as too wide.
    is_wide = ~(jnp.min(found["lowest"]) >= form_lib.LOWEST_SUM)
    result = form_lib.forward_or_again(is_wide, form, layout, operands, result)
    saved += (jnp.broadcast_to(is_wide, num_tiles),)
  return result, saved if save else None


def _backward(of_memory, other, form, layout, operands, saved, cotangents):
  """Runs the backward pass; see `form.Engine`."""
  inputs = operands.inputs
  plan = plan_of(of_memory, form, inputs, "backward")
  if plan is None:
    return other.backward(form, layout, operands, saved, cotangents)

  def by_kernel():
    return _backward_kernel(
      of_memory, plan, form, layout, operands, saved[0], cotangents
    )

  if not plan.kernel.factors_decays:
    return by_kernel()
  return form_lib.backward_or_again(
    jnp.any(saved[1]), form, layout, operands, cotangents, by_kernel
  )


def _backward_kernel(
  of_memory, plan, form, layout, operands, saved, cotangents
) -> form_lib.Operands:
  """Returns the adjoints of all operands."""
  inputs = operands.inputs
  packed, unpack, flags = prepare(of_memory, plan, form, layout, inputs)
  (start,) = operands.chunk_start
  (d_final,), (d_start,) = cotangents.memories, cotangents.chunk_start
  start, d_final, d_start = (
    pack_memory(plan, x) for x in (start, d_final, d_start)
  )
  missing = packed["query"].shape[1] // plan.tile - saved.shape[0]
  saved = jnp.pad(saved, [(0, missing)] + [(0, 0)] * (saved.ndim - 1))
  d_output = layout_lib.flat(layout, cotangents.outputs)
  d_output = contract.pad_time(d_output, plan.step_tokens).astype(
    packed["query"].dtype
  )
  found = call.backward(
    plan,
    packed,
    saved,
    d_output.reshape(*d_output.shape[:2], -1),
    d_final,
    flags=flags,
    chunk_start=start,
    d_last=d_start,
  )
  d_packed = {
    name: jnp.zeros_like(x) if name in plan_lib.COARSE else found[f"d_{name}"]
    for name, x in packed.items()
  }
  (d_inputs,) = unpack(d_packed)
  if flags is not None and not plan.inner:
    d_start = layout_lib.kept(layout, d_start) + found["d_chunk_start"]
  d_reset = found.get("d_reset", jnp.zeros_like(d_final))
  d_memory, d_start, d_reset = (
    (_unpack_memory(plan, x),) for x in (found["d_memory"], d_start, d_reset)
  )
  return form_lib.Operands(d_memory, d_start, d_reset, d_inputs)


def _as_saved(of_memory, other, form, operands):
  """Converts memories to their saved form; see `form.Engine`."""
  plan = plan_of(of_memory, form, operands.inputs, "forward")
  if plan is None:
    return other.as_saved(form, operands)
  (memory,) = operands.memories
  saved = (pack_memory(plan, memory).astype(operands.inputs.query.dtype),)
  if plan.kernel.factors_decays:
    return *saved, jnp.zeros((), bool)
  return saved


def engine(of_memory: OfMemory, other: form_lib.Engine) -> form_lib.Engine:
  """Returns the engine of a memory.

  Args:
    of_memory: Converts the memory's inputs to tokens.
    other: Engine that runs the calls that these kernels do not fit.
  """
  return form_lib.Engine(
    functools.partial(_forward, of_memory, other),
    functools.partial(_backward, of_memory, other),
    functools.partial(_as_saved, of_memory, other),
  )
