"""Calls Trellis's TPU kernels: builds their blocks, operands and results."""

import functools
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

FIX = (
  "take fewer slots or narrower heads, and leave out Tiling.forward and"
  " Tiling.backward"
)


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


def _specs(block: _Blocks, arrays: dict[str, Any]) -> dict[str, Any]:
  """Returns the block specs of operands and results, by name."""
  keys, values = block.plan.unit.widths
  found = {
    "query": block.by_token(keys),
    "key": block.by_token(keys),
    "value": block.by_token(values),
    "output": block.by_token(values),
    "rows": block.rows(),
    "saved": block.saved(),
    **writes(block.plan).blocks_of(block),
  }
  memories = block.memories()
  return {k: found.get(k.removeprefix("d_"), memories) for k in arrays}


def _call(
  module: Any,
  plan: plan_lib.Plan,
  name: str,
  operands: dict[str, Any],
  results: dict[str, Any],
  flags: jax.Array | None,
) -> dict[str, Any]:
  """Runs a kernel over the grid (rows, units, chunks)."""
  batch, time = operands["query"].shape[:2]
  unit, backward = plan.unit, module is backward_lib
  steps = time // (unit.tokens * plan.chunks)
  units = operands["query"].shape[2] // unit.widths[0]
  absent = dict.fromkeys(module.Refs._fields)
  carried = tuple(
    pltpu.VMEM((plan.step_units, unit.slots, width), jnp.float32)
    for width in unit.widths
  )
  solver = writes(plan).scratch(plan, backward=backward)
  block = _Blocks(plan, steps, reverse=backward)
  return launch.run(
    lambda refs: module.run(module.Refs(**absent | refs), plan, writes(plan)),
    name,
    (batch // plan.rows, units // plan.units, steps),
    operands,
    results,
    specs=_specs(block, operands | results),
    scratch={"carried": carried, "solver": solver},
    fix=FIX,
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
  dtype, struct = packed.query.dtype, jax.ShapeDtypeStruct
  like = jax.tree.map(lambda x: struct(x.shape, jnp.float32), memories)
  operands: dict[str, Any] = {**packed._asdict(), "memories": memories}
  results = {"output": struct(packed.value.shape, dtype), "final": like}
  if flags is not None:
    operands["reset"] = reset
    if writes(plan).READS_START:
      operands["start"], results["last"] = start, like
  if save:
    num_chunks = packed.query.shape[1] // plan.unit.tokens
    results["saved"] = jax.tree.map(
      lambda x: struct((num_chunks, *x.shape), dtype), memories
    )
  return _call(forward_lib, plan, "trellis_forward", operands, results, flags)


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
  final = cotangents["final"]
  like = jax.tree.map(lambda x: launch.struct(x, jnp.float32), final)
  operands: dict[str, Any] = {
    **packed._asdict(),
    "saved": saved,
    "d_output": cotangents["output"],
    "d_final": final,
  }
  results: dict[str, Any] = {
    f"d_{name}": launch.struct(x)
    for name, x in packed._asdict().items()
    if x is not None
  }
  results["d_memories"] = like
  if flags is not None:
    results["d_reset"] = like
    if writes(plan).READS_START:
      operands |= {"start": start, "d_chunk_start": cotangents["chunk_start"]}
      results["d_start"] = like
  return _call(backward_lib, plan, "trellis_backward", operands, results, flags)


@functools.lru_cache(maxsize=1024)
def needed(
  plan: plan_lib.Plan, direction: str, dtype: Any, target_dtype: Any
) -> int:
  """Returns the bytes of VMEM that a kernel needs, with flags.

  Args:
    plan: Plan of the kernel.
    direction: "forward" or "backward".
    dtype: Dtype of queries, keys and values.
    target_dtype: Dtype of targets.
  """
  unit = plan.unit
  struct: Any = jax.ShapeDtypeStruct
  tokens = plan.rows, unit.tokens * plan.chunks
  keys, values = (struct((*tokens, plan.units * n), dtype) for n in unit.widths)
  slots = plan.units * unit.heads * unit.slots
  rows = plan.rows, plan.units, plan.chunks, len(plan.row_names), unit.lanes
  packed = Packed(
    query=keys,
    key=keys,
    value=values,
    target=jax.eval_shape(
      writes(plan).lay_target, struct((*tokens, slots), target_dtype)
    ),
    rows=struct(rows, jnp.float32),
    lanes=writes(plan).shape_of_lanes(plan),
  )
  flags = struct((plan.rows, plan.chunks), jnp.int32)
  size = plan.rows, plan.units, unit.slots
  memories = tuple(struct((*size, n), jnp.float32) for n in unit.widths)
  if direction == "forward":
    run = functools.partial(forward, plan, save=True)
    return launch.needed(run, packed, flags, memories, memories, memories)
  saved = tuple(struct((plan.chunks, *x.shape), dtype) for x in memories)
  adjoints = {"output": values, "final": memories, "chunk_start": memories}
  run = functools.partial(backward, plan)
  return launch.needed(run, packed, flags, saved, memories, adjoints)
