"""Calls the kernels over tokens: builds their blocks, operands and results."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.pallas_tpu import launch, schedule
from memcomp_kernels.pallas_tpu.affine import prepared, tile
from memcomp_kernels.pallas_tpu.affine.plan import COARSE, Plan, split

_D_KEYS = "d_query", "d_key"


def _run(plan: Plan, refs: dict[str, Any], way: int, tiles: range, first):
  """Emits one grid step.

  Args:
    plan: Plan of the kernel.
    refs: References by name.
    way: 0 forward, 1 backward.
    tiles: Tiles of the step, in their order.
    first: Index of the step's first tile, for the flags.
  """
  piece, (group, skew) = plan.kernel.pieces[way], plan.kernel.schedules[way]
  kept: dict[Any, Any] = {}

  def at(i, u):
    flags = None
    if "flags" in refs:
      flags = refs["flags"][pl.program_id(0), first + i]
    return piece(tile.UnitTile(plan, refs, kept, flags, i, u))

  schedule.run(at, chunks=tiles, units=plan.step_units, group=group, skew=skew)


def _forward_body(refs: dict[str, Any], plan: Plan) -> None:
  """Runs one grid step of the forward kernel; see `forward`."""
  step = pl.program_id(2)

  @pl.when(step == 0)
  def _():
    refs["carried"][...] = refs["memory"][0]
    for name in ("last", "lowest"):
      if name in refs:
        refs[name][...] = jnp.zeros_like(refs[name])

  tiles, first = range(plan.step_tiles), step * plan.step_tiles
  _run(plan, refs, 0, tiles, first)

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    refs["final"][0] = refs["carried"][...]


def _backward_body(refs: dict[str, Any], plan: Plan) -> None:
  """Runs one grid step of the backward kernel, last tile first."""
  step, steps = pl.program_id(2), pl.num_programs(2)

  @pl.when(step == 0)
  def _():
    refs["carried"][...] = refs["d_final"][0]
    for name in ("d_reset", "d_chunk_start"):
      if name in refs:
        refs[name][...] = jnp.zeros_like(refs[name])

  tiles = range(plan.step_tiles)[::-1]
  first = (steps - 1 - step) * plan.step_tiles
  _run(plan, refs, 1, tiles, first)

  @pl.when(step == steps - 1)
  def _():
    refs["d_memory"][0] = refs["carried"][...]


def _call(
  body: Callable[..., None],
  direction: str,
  plan: Plan,
  operands: dict[str, jax.Array],
  results: dict[str, jax.ShapeDtypeStruct],
  flags: jax.Array | None,
) -> dict[str, jax.Array]:
  """Runs a body over the grid (batch, units, tiles).

  Args:
    body: Takes the references by name, and the plan.
    direction: "forward" or "backward"; "backward" starts at the last tile.
    plan: Plan of the kernel.
    operands: Arrays by name. Tokens are `[batch, time, width]`, gates `[batch,
      Plan.steps, steps of time, Plan.gate_rows, lanes]`, memories `[batch,
      units, key, unit * value]`, and `saved` has a leading axis of tiles.
    results: Shapes by name, with the same layouts.
    flags: Flags of each tile, int32 `[batch, tiles]`, or None.
  """
  batch, time = operands["query"].shape[:2]
  steps = time // plan.step_tokens
  memory = plan.step_units, plan.key_dim, plan.value_width

  def at(i):
    return steps - 1 - i if direction == "backward" else i

  def spec(name, x):
    if name == "saved":
      block = plan.step_tiles, 1, *memory
      return pl.BlockSpec(block, lambda b, u, i, *_: (at(i), b, u, 0, 0))
    if name == "columns" or name.removeprefix("d_") in plan.gates:
      block = 1, 1, 1, *x.shape[3:]
      rest = (0,) * (x.ndim - 3)
      return pl.BlockSpec(block, lambda b, u, i, *_: (b, u, at(i), *rest))
    if name == "lowest":
      block = 1, 1, *x.shape[2:]
      return pl.BlockSpec(block, lambda b, u, i, *_: (b, u, 0, 0))
    if x.ndim == 4:
      return pl.BlockSpec((1, *memory), lambda b, u, i, *_: (b, u, 0, 0))
    is_key = name.endswith(("query", "key"))
    width = plan.step_keys if is_key else plan.step_units * plan.value_width
    block = 1, plan.step_tokens, width
    if is_key and not name.startswith("d_") and plan.key_parts > 1:
      # `//` would query the TPU's kind, because it rounds down.
      return pl.BlockSpec(
        block, lambda b, u, i, *_: (b, at(i), lax.div(u, plan.key_parts))
      )
    return pl.BlockSpec(block, lambda b, u, i, *_: (b, at(i), u))

  return launch.run(
    functools.partial(body, plan=plan),
    f"{plan.kernel.name}_{direction}",
    (batch, plan.steps, steps),
    operands,
    results,
    specs={key: spec(key, x) for key, x in (operands | results).items()},
    scratch={"carried": pltpu.VMEM(memory, jnp.float32)},
    fix=prepared.FIX,
    scalars={"flags": flags},
  )


_struct = jax.ShapeDtypeStruct


@functools.lru_cache(maxsize=1024)
def needed(plan: Plan, direction: str, dtype: Any) -> int:
  """Returns the bytes of VMEM that a kernel needs, with flags.

  Args:
    plan: Plan of the kernel.
    direction: "forward" or "backward".
    dtype: Dtype of products.
  """
  heads, key_dim = plan.heads, plan.key_dim
  keys = _struct((1, plan.step_tokens, heads // plan.shared * key_dim), dtype)
  values = _struct((1, plan.step_tokens, heads * plan.value_dim), dtype)
  tokens = {"query": keys, "key": keys, "value": values}
  for name in plan.gates:
    lanes = plan.unit * plan.value_dim if name == "total" else plan.gate_lanes
    shape = 1, plan.steps, 1, plan.gate_rows, lanes
    tokens[name] = _struct(shape, jnp.float32)
  memory = _struct((1, plan.units, key_dim, plan.value_width), jnp.float32)
  flags = _struct((1, plan.step_tiles), jnp.int32)
  if direction == "forward":
    return launch.needed(
      functools.partial(forward, plan, save=True),
      tokens,
      memory,
      flags=flags,
      reset=memory,
      chunk_start=memory,
    )
  return launch.needed(
    functools.partial(backward, plan),
    tokens,
    _struct((plan.step_tiles, *memory.shape), dtype),
    values,
    memory,
    flags=flags,
    chunk_start=memory,
    d_last=memory,
  )


def forward(
  plan: Plan,
  tokens: dict[str, jax.Array],
  memory: jax.Array,
  *,
  flags: jax.Array | None = None,
  reset: jax.Array | None = None,
  chunk_start: jax.Array | None = None,
  save: bool = False,
) -> dict[str, jax.Array]:
  """Runs the forward kernel.

  A is the memory.

  Args:
    plan: Plan of the kernel.
    tokens: Arrays for a whole number of grid steps. `query` and `key` are
      `[batch, time, groups * key]`, `value` is `[batch, time, heads * value]`.
      `Plan.gates` are float32 `[batch, Plan.steps, steps of time,
      Plan.gate_rows, Plan.gate_lanes]`; `total` is by value, not by token.
      Empty positions write nothing.
    memory: A before the first tile, `[batch, units, key, unit * value]`,
      float32.
    flags: Flags of each tile, int32 `[batch, tiles]`, or None if no tile is
      special.
    reset: With flags, the memory that a segment starts from, shaped as
      `memory`.
    chunk_start: With flags, the memory at the start of a chunk that an earlier
      call has begun, shaped as `memory`.
    save: Whether to return `saved`.

  Returns:
    A dictionary of arrays by name. `output` is Y, shaped as `value`. `final` is
    A after the last tile. `saved` is A before each tile, `[tiles, batch, units,
    key, unit * value]`, in the dtype of products. With flags and
    `read="start"`, `last` is the memory at the start of each row's last chunk.
    If the kernel factors decays, `lowest` is a tile's lowest sum of log decays,
    `[batch, Plan.steps, rows, lanes]`.
  """
  given: dict[str, Any] = tokens | {"memory": memory}
  if plan.inner or plan.kernel.factors_decays:
    given["columns"] = split(plan, tokens)
  results = {
    "output": _struct(tokens["value"].shape, plan.dtype),
    "final": _struct(memory.shape, memory.dtype),
  }
  if save:
    shape = tokens["query"].shape[1] // plan.tile, *memory.shape
    results["saved"] = _struct(shape, tokens["query"].dtype)
  if plan.kernel.factors_decays:
    rows = -(-plan.step_units // 8) * 8
    shape = memory.shape[0], plan.steps, rows, plan.key_width
    results["lowest"] = _struct(shape, jnp.float32)
  if flags is not None:
    given["reset"] = reset
    if not plan.inner:
      given["chunk_start"] = chunk_start
      results["last"] = _struct(memory.shape, memory.dtype)
  return _call(_forward_body, "forward", plan, given, results, flags)


def backward(
  plan: Plan,
  tokens: dict[str, jax.Array],
  saved: jax.Array,
  d_output: jax.Array,
  d_final: jax.Array,
  *,
  flags: jax.Array | None = None,
  chunk_start: jax.Array | None = None,
  d_last: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """Runs the backward kernel.

  Args:
    plan: Plan of the kernel.
    tokens: The tokens of `forward`.
    saved: Result `saved` of the forward kernel.
    d_output: Adjoint of its `output`, in the dtype of products.
    d_final: Adjoint of its `final`.
    flags: The flags of `forward`.
    chunk_start: The chunk start of `forward`.
    d_last: Adjoint of its `last`.

  Returns:
    Adjoints, each named `d_` and its operand's name: of all tokens, of `memory`
    and, with flags, of `reset` and (if the kernel has it) `chunk_start`.
  """
  given: dict[str, Any] = tokens | {
    "saved": saved,
    "d_output": d_output,
    "d_final": d_final,
  }
  given["columns"] = split(plan, tokens)
  memory = _struct(d_final.shape, d_final.dtype)
  results = {
    f"d_{name}": _struct(x.shape, x.dtype)
    for name, x in tokens.items()
    if name not in COARSE
  }
  if plan.key_parts > 1:  # each grid step stores a partial sum
    shape = *tokens["key"].shape[:2], plan.steps * plan.key_dim
    results |= {name: _struct(shape, jnp.float32) for name in _D_KEYS}
  results["d_memory"] = memory
  if flags is not None:
    results["d_reset"] = memory
    if not plan.inner:
      given |= {"chunk_start": chunk_start, "d_last": d_last}
      results["d_chunk_start"] = memory
  found = _call(_backward_body, "backward", plan, given, results, flags)
  if plan.key_parts > 1:
    for name in _D_KEYS:
      like = tokens["key"]
      x = found[name].reshape(*like.shape[:2], -1, plan.key_parts, plan.key_dim)
      found[name] = jnp.sum(x, axis=3).astype(like.dtype).reshape(like.shape)
  return found
