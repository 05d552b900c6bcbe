"""Calls Lattice's TPU kernels: builds their blocks, operands and results."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.lattice.pallas_tpu import backward as backward_lib
from memcomp_kernels.lattice.pallas_tpu import forward as forward_lib
from memcomp_kernels.lattice.pallas_tpu import plan as plan_lib
from memcomp_kernels.pallas_tpu import LANES, launch


class Packed(NamedTuple):
  """Tokens in the kernels' layout, `[blocks, time, ..., lanes]`."""

  query: jax.Array
  key: jax.Array
  value: jax.Array
  gates: jax.Array


FIX = "take shorter tiles (Tiling.kernel_time, chunk_size)"

# How a block depends on the grid indices (blocks, tiles).
_BY_TOKEN, _BY_TILE, _MEMORY = "by token", "by tile", "memory"
_KINDS = {
  "flags": _BY_TILE,
  **dict.fromkeys(
    ("memory", "reset", "start", "final", "last", "chunk_start"), _MEMORY
  ),
}


def _spec(name: str, x: Any, plan: plan_lib.Plan, at: Callable) -> pl.BlockSpec:
  kind = _KINDS.get(name.removeprefix("d_"), _BY_TOKEN)
  if kind == _MEMORY:
    return pl.BlockSpec((1, *x.shape[1:]), lambda b, i: (b, 0, 0, 0))
  rest = (0,) * (x.ndim - 2)
  if name == "saved":
    return pl.BlockSpec((1, 1, *x.shape[2:]), lambda b, i: (at(i), b, *rest))
  size = plan.tokens if kind == _BY_TOKEN else 1
  return pl.BlockSpec((1, size, *x.shape[2:]), lambda b, i: (b, at(i), *rest))


def _scratch(refs: type, plan: plan_lib.Plan) -> dict[str, Any]:
  """Returns the scratch arrays that a kernel needs, by name."""
  tokens, memory, by_slot = plan.tokens, plan.memory, plan.by_slot
  shapes = {
    "rows": (forward_lib.KINDS, *by_slot),
    "squares": by_slot,
    "untouched": by_slot,
    "d_squares": by_slot,
    "states": (tokens + 1, *memory),
    "written": (tokens, *memory[1:]),
    "shares": (tokens, *by_slot),
    "lengths": (tokens, 1, LANES),
  }
  if plan.spec.chunked:
    shapes |= {"base": memory, "d_base": memory}
  else:
    shapes["before"] = tokens, 2, *by_slot
  return {
    name: pltpu.VMEM(shape, jnp.float32)
    for name, shape in shapes.items()
    if name in refs._fields
  }


def _call(
  module: Any,
  plan: plan_lib.Plan,
  name: str,
  operands: dict[str, jax.Array],
  results: dict[str, jax.ShapeDtypeStruct],
  *,
  reverse: bool,
) -> dict[str, jax.Array]:
  """Runs a kernel over the grid (blocks, tiles)."""
  absent = dict.fromkeys(module.Refs._fields)
  steps, arrays = operands["query"].shape[1] // plan.tokens, operands | results

  def at(i):
    return steps - 1 - i if reverse else i

  return launch.run(
    lambda refs: module.run(module.Refs(**absent | refs), plan),
    name,
    (plan.lanes.blocks, steps),
    operands,
    results,
    specs={name: _spec(name, x, plan, at) for name, x in arrays.items()},
    scratch=_scratch(module.Refs, plan),
    fix=FIX,
  )


def forward(
  plan: plan_lib.Plan,
  packed: Packed,
  flags: jax.Array | None,
  memory: jax.Array,
  reset: jax.Array,
  start: jax.Array,
  save: bool,
) -> dict[str, jax.Array]:
  """Runs the forward kernel.

  Args:
    plan: Plan of the kernel.
    packed: Tokens of a whole number of tiles.
    flags: Flags, `[blocks, tiles, plan_lib.FLAGS, lanes]`, or None.
    memory: Memory before the first token, `[blocks, slots, rows, lanes]`.
    reset: Memory that segments start from, shaped as `memory`; not read without
      flags.
    start: Memory at the start of a chunk that began before the call, shaped as
      `memory`; not read without flags or chunks.
    save: Whether to return `saved`.

  Returns:
    Arrays by name. `output` is shaped as `packed.value`. `final` and (with
    chunks) `last` are shaped as `memory`. `saved` is float32 `[tiles, blocks,
    slots, rows, lanes]`.
  """
  operands = packed._asdict()
  results = {"output": launch.struct(packed.value, packed.query.dtype)}
  if flags is not None:
    operands |= {"flags": flags, "reset": reset}
    if plan.spec.chunked:
      operands["start"] = start
      results["last"] = launch.struct(memory)
  operands["memory"] = memory
  results["final"] = launch.struct(memory)
  if save:
    blocks, *shape = memory.shape
    tiles = packed.query.shape[1] // plan.tokens
    shape = tiles, blocks, *shape
    results["saved"] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return _call(
    forward_lib, plan, "lattice_forward", operands, results, reverse=False
  )


@functools.lru_cache(maxsize=1024)
def needed(plan: plan_lib.Plan, dtype: Any) -> int:
  """Returns the bytes of VMEM that the backward kernel needs.

  The forward kernel needs less.
  """
  tokens, lanes, by_slot = plan.tokens, LANES, plan.by_slot
  struct: Any = jax.ShapeDtypeStruct
  packed = Packed(
    struct((1, tokens, *by_slot), dtype),
    struct((1, tokens, *by_slot), dtype),
    struct((1, tokens, plan.rows, lanes), dtype),
    struct((1, tokens, plan_lib.ROWS, lanes), jnp.float32),
  )
  memory = struct((1, *plan.memory), jnp.float32)
  flags = struct((1, 1, plan_lib.FLAGS, lanes), jnp.float32)
  return launch.needed(
    functools.partial(backward, plan),
    packed,
    flags if plan.flagged else None,
    struct((1, 1, *plan.memory), jnp.float32),
    memory,
    memory,
    packed.value,
    memory,
    memory,
  )


def backward(
  plan: plan_lib.Plan,
  packed: Packed,
  flags: jax.Array | None,
  saved: jax.Array,
  reset: jax.Array,
  start: jax.Array,
  d_output: jax.Array,
  d_final: jax.Array,
  d_chunk_start: jax.Array,
) -> dict[str, jax.Array]:
  """Runs the backward kernel.

  Args:
    plan: Plan of the kernel.
    packed: The tokens of `forward`.
    flags: The flags of `forward`.
    saved: Result `saved` of the forward kernel.
    reset: The reset memory of `forward`.
    start: The chunk start of `forward`.
    d_output: Adjoint of the output, shaped as `packed.value`.
    d_final: Adjoint of the final memory.
    d_chunk_start: Adjoint of the last chunk's start; not read without chunks.

  Returns:
    Adjoints of the fields of `packed`, each named `d_` and the field's name,
    and `d_memory`. With flags also `d_reset`, and with chunks `d_start`.
  """
  operands = packed._asdict() | {
    "saved": saved,
    "d_output": d_output,
    "d_final": d_final,
  }
  if flags is not None:
    operands |= {"flags": flags, "reset": reset}
    if plan.spec.chunked:
      operands |= {"start": start, "d_chunk_start": d_chunk_start}
  memory = launch.struct(d_final)
  results = {
    f"d_{name}": launch.struct(x) for name, x in packed._asdict().items()
  }
  results["d_memory"] = memory
  if flags is not None:
    results["d_reset"] = memory
    if plan.spec.chunked:
      results["d_start"] = memory
  return _call(
    backward_lib, plan, "lattice_backward", operands, results, reverse=True
  )
