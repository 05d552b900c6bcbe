"""Calls Trellis's TPU kernels: builds their blocks, operands and results."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.trellis.pallas_tpu import backward as backward_lib
from memcomp_kernels.trellis.pallas_tpu import chunk_start, per_token
from memcomp_kernels.trellis.pallas_tpu import forward as forward_lib
from memcomp_kernels.trellis.pallas_tpu import plan as plan_lib


def writes(plan: plan_lib.Plan) -> Any:
  """Returns the module of a plan's write directions."""
  token = isinstance(plan, plan_lib.PerTokenPlan)
  return per_token if token else chunk_start


class Packed(NamedTuple):
  """Operands in the kernels' layout; see `plan` and `engine`."""

  query: jax.Array
  key: jax.Array
  value: jax.Array
  target: jax.Array
  rows: jax.Array
  lanes: jax.Array | None = None


class _Blocks:
  """Block specs of a kernel over the grid (rows, units, chunks).

  Attributes:
    plan: Plan of the kernel.
    at: Maps a grid step to its block of chunks.
  """

  def __init__(self, plan: plan_lib.Plan, steps: int, *, reverse: bool):
    self.plan = plan
    self.at = (lambda i: steps - 1 - i) if reverse else lambda i: i

  def by_token(self, width: int) -> pl.BlockSpec:
    unit, plan = self.plan.unit, self.plan
    shape = plan.rows, unit.tokens * plan.chunks, plan.units * width
    return pl.BlockSpec(shape, lambda b, u, i, *_: (b, self.at(i), u))

  def rows(self) -> pl.BlockSpec:
    plan = self.plan
    sizes = plan.chunks, len(plan.row_names), plan.unit.lanes
    shape = plan.rows, plan.units, *sizes
    return pl.BlockSpec(shape, lambda b, u, i, *_: (b, u, self.at(i), 0, 0))

  def memories(self) -> plan_lib.Pair:
    plan = self.plan
    return tuple(
      pl.BlockSpec(
        (plan.rows, plan.units, plan.unit.slots, width),
        lambda b, u, i, *_: (b, u, 0, 0),
      )
      for width in plan.unit.widths
    )

  def saved(self) -> plan_lib.Pair:
    plan = self.plan
    return tuple(
      pl.BlockSpec(
        (plan.chunks, plan.rows, plan.units, plan.unit.slots, width),
        lambda b, u, i, *_: (self.at(i), b, u, 0, 0),
      )
      for width in plan.unit.widths
    )


def _call(
  module: Any,
  plan: plan_lib.Plan,
  name: str,
  operands: dict[str, Any],
  results: dict[str, Any],
  specs: dict[str, Any],
  flags: jax.Array | None,
) -> dict[str, Any]:
  """Runs a kernel over the grid (rows, units, chunks)."""
  batch, time = operands["query"].shape[:2]
  unit = plan.unit
  units = operands["query"].shape[2] // unit.widths[0]
  absent = dict.fromkeys(module.Refs._fields)
  carried = tuple(
    pltpu.VMEM((plan.step_units, unit.slots, width), jnp.float32)
    for width in unit.widths
  )
  solver = writes(plan).scratch(plan, backward=module is backward_lib)
  return launch.run(
    lambda refs: module.run(module.Refs(**absent | refs), plan, writes(plan)),
    name,
    (
      batch // plan.rows,
      units // plan.units,
      time // (unit.tokens * plan.chunks),
    ),
    operands,
    results,
    specs=specs,
    scratch={"carried": carried, "solver": solver},
    fix="take fewer units or chunks a step (tilings.KernelTiling)",
    scalars={"flags": flags},
  )


def forward(
  plan: plan_lib.Plan,
  packed: Packed,
  flags: jax.Array | None,
  memories: plan_lib.Pair,
  reset: plan_lib.Pair,
  start: plan_lib.Pair,
  save: bool,
) -> dict[str, Any]:
  """Runs the forward kernel.

  Args:
    plan: Plan of the kernel.
    packed: Tokens of a whole number of grid steps.
    flags: Flags of each chunk, int32 `[batch, chunks]`, or None.
    memories: Halved memories before the first token, `[batch, units, slots,
      width]`.
    reset: Halved memories that segments start from; not read without flags.
    start: Halved memories at the start of a chunk that an earlier call has
      begun; not read without flags.
    save: Whether to return `saved`.

  Returns:
    A dictionary; see `forward.Refs`. `output` is by token. `final` are
    memories. `last` exists with flags, but not with gradients per token.
    `saved` is `[chunks, batch, units, slots, width]`.
  """
  unit = plan.unit
  num_chunks = packed.query.shape[1] // unit.tokens
  block = _Blocks(plan, num_chunks // plan.chunks, reverse=False)
  keys, values = unit.widths
  struct = jax.ShapeDtypeStruct
  like = jax.tree.map(lambda x: struct(x.shape, jnp.float32), memories)
  flagged = flags is not None
  operands = {**packed._asdict(), "memories": memories}
  specs: dict[str, Any] = {
    "query": block.by_token(keys),
    "key": block.by_token(keys),
    "value": block.by_token(values),
    "rows": block.rows(),
    **writes(plan).blocks_of(block),
    "memories": block.memories(),
  }
  if flagged:
    operands["reset"], specs["reset"] = reset, block.memories()
  if flagged and writes(plan).READS_START:
    operands["start"], specs["start"] = start, block.memories()
  results: dict[str, Any] = {
    "output": struct(packed.value.shape, packed.query.dtype)
  }
  specs["output"] = block.by_token(values)
  results["final"], specs["final"] = like, block.memories()
  if flagged and writes(plan).READS_START:
    results["last"], specs["last"] = like, block.memories()
  if save:
    results["saved"] = jax.tree.map(
      lambda x: struct((num_chunks, *x.shape), packed.query.dtype), memories
    )
    specs["saved"] = block.saved()
  return _call(
    forward_lib, plan, "trellis_forward", operands, results, specs, flags
  )


def backward(
  plan: plan_lib.Plan,
  packed: Packed,
  flags: jax.Array | None,
  saved: plan_lib.Pair,
  start: plan_lib.Pair,
  cotangents: dict[str, Any],
) -> dict[str, Any]:
  """Runs the backward kernel.

  Args:
    plan: Plan of the kernel.
    packed: The tokens of `forward`.
    flags: The flags of `forward`.
    saved: Result `saved` of the forward kernel.
    start: The chunk start of `forward`.
    cotangents: Cotangents of `output`, and of the halved `final` and
      `chunk_start`.

  Returns:
    Adjoints of the fields of `packed`, each named `d_` and the field's name,
    and `d_memories`. With flags also `d_reset` and, except with gradients per
    token, `d_start`.
  """
  unit = plan.unit
  num_chunks = packed.query.shape[1] // unit.tokens
  block = _Blocks(plan, num_chunks // plan.chunks, reverse=True)
  keys, values = unit.widths
  struct = jax.ShapeDtypeStruct
  like = jax.tree.map(
    lambda x: struct(x.shape, jnp.float32), cotangents["final"]
  )
  flagged = flags is not None
  operands = {
    **packed._asdict(),
    "saved": saved,
    "d_output": cotangents["output"],
    "d_final": cotangents["final"],
  }
  inputs = {
    "query": block.by_token(keys),
    "key": block.by_token(keys),
    "value": block.by_token(values),
    "rows": block.rows(),
    **writes(plan).blocks_of(block),
  }
  specs: dict[str, Any] = inputs | {
    "saved": block.saved(),
    "d_output": block.by_token(values),
    "d_final": block.memories(),
  }
  results: dict[str, Any] = {
    f"d_{name}": struct(x.shape, x.dtype)
    for name, x in packed._asdict().items()
    if x is not None
  }
  specs |= {name: inputs[name.removeprefix("d_")] for name in results}
  results["d_memories"], specs["d_memories"] = like, block.memories()
  if flagged:
    results["d_reset"], specs["d_reset"] = like, block.memories()
  if flagged and writes(plan).READS_START:
    operands |= {
      "start": start,
      "d_chunk_start": cotangents["chunk_start"],
    }
    specs |= {"start": block.memories(), "d_chunk_start": block.memories()}
    results["d_start"], specs["d_start"] = like, block.memories()
  return _call(
    backward_lib, plan, "trellis_backward", operands, results, specs, flags
  )
