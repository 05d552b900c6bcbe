"""The algebra of `affine` as Pallas TPU kernels: the memory stays in VMEM.

One kernel per direction runs all tiles of some heads and keeps their memories
from tile to tile. XLA prepares whatever does not depend on the memory, for all
tiles at once. One grid step runs several tiles of several heads. The body
interleaves their matmuls, because the TPU compiler keeps matmuls in order.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels import affine, contract, dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import prepared_engine
from memcomp_kernels.pallas_tpu import blocks, launch

HEADS, TILES = 12, 4
"""Maximum heads and tiles per grid step.

They were chosen by static cycle counts (docs/tpu-kernels.md)."""

FIX = "take narrower heads"


def _forward_body(refs: dict[str, Any], size: int, heads: int) -> None:
  """Runs one grid step of the forward kernel; see `forward`."""
  batch, step = pl.program_id(0), pl.program_id(2)
  carried, every = refs["carried"], range(heads)

  @pl.when(step == 0)
  def _():
    carried[...] = refs["memory"][0]

  for i in range(size):
    memory = [carried[h] for h in every]
    if "resets" in refs:
      resets = refs["resets"][batch, step * size + i] != 0
      memory = [
        jnp.where(resets, refs["reset"][0, h], memory[h]) for h in every
      ]
    query = _of_heads(refs["query"], i, heads)
    dtype = query[0].dtype
    low = [x.astype(dtype) for x in memory]
    if "saved" in refs:
      for h in every:
        refs["saved"][i, 0, h] = low[h]
    error = _of_heads(refs["write"], i, heads)
    if "erase" in refs:
      erase = _of_heads(refs["erase"], i, heads)
      error = [error[h] - blocks.nn(erase[h], low[h]) for h in every]
    # These come before the matmuls that wait for the errors.
    for h in every:
      refs["read"][i, 0, h] = blocks.nn(query[h], low[h])
    key = _of_heads(refs["key"], i, heads)
    written = [blocks.tn(key[h], error[h].astype(dtype)) for h in every]
    for h in every:
      carried[h] = refs["total"][i, 0, h] * memory[h] + written[h]

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    refs["final"][0] = carried[...]


def _backward_body(refs: dict[str, Any], size: int, heads: int) -> None:
  """Runs one grid step of the backward kernel, last tile first."""
  batch, step = pl.program_id(0), pl.program_id(2)
  steps = pl.num_programs(2)
  carried, every = refs["carried"], range(heads)

  @pl.when(step == 0)
  def _():
    carried[...] = refs["d_final"][0]
    if "d_reset" in refs:
      refs["d_reset"][...] = jnp.zeros_like(refs["d_reset"])

  for i in reversed(range(size)):
    d_after = [carried[h] for h in every]
    low = [refs["saved"][i, 0, h] for h in every]
    dtype = low[0].dtype
    d_low = [x.astype(dtype) for x in d_after]
    d_read = [x.astype(dtype) for x in _of_heads(refs["d_read"], i, heads)]
    key, query = (_of_heads(refs[name], i, heads) for name in ("key", "query"))
    d_error = [blocks.nn(key[h], d_low[h]) for h in every]
    error = _of_heads(refs["write"], i, heads)
    d_memory = [blocks.tn(query[h], d_read[h]) for h in every]
    if "erase" in refs:
      erase = _of_heads(refs["erase"], i, heads)
      error = [error[h] - blocks.nn(erase[h], low[h]) for h in every]
      d_errors = [d_error[h].astype(dtype) for h in every]
      for h in every:
        d_erase = -blocks.nt(d_errors[h], low[h])
        refs["d_erase"][i, 0, h] = d_erase.astype(dtype)
        d_memory[h] = d_memory[h] - blocks.tn(erase[h], d_errors[h])
    for h in every:
      refs["d_write"][i, 0, h] = d_error[h]
      d_key = blocks.nt(error[h].astype(dtype), d_low[h])
      refs["d_key"][i, 0, h] = d_key.astype(refs["d_key"].dtype)
      d_query = blocks.nt(d_read[h], low[h])
      refs["d_query"][i, 0, h] = d_query.astype(refs["d_query"].dtype)
      d_total = low[h].astype(jnp.float32) * d_after[h]
      refs["d_total"][i, 0, h] = jnp.sum(d_total, axis=0, keepdims=True)
      d_memory[h] = d_memory[h] + refs["total"][i, 0, h] * d_after[h]
    if "resets" in refs:
      place = (steps - 1 - step) * size + i
      resets = refs["resets"][batch, place] != 0
      for h in every:
        started = jnp.where(resets, d_memory[h], 0.0)
        refs["d_reset"][0, h] = refs["d_reset"][0, h] + started
        d_memory[h] = d_memory[h] - started
    for h in every:
      carried[h] = d_memory[h]

  @pl.when(step == steps - 1)
  def _():
    refs["d_memory"][0] = carried[...]


def _of_heads(ref: jax.Ref, tile: int, heads: int) -> list[jax.Array]:
  """Returns a tile's arrays, one per head; heads of a group share its array."""
  shared = ref.shape[2] == 1
  arrays = [ref[tile, 0, h] for h in range(ref.shape[2])]
  return arrays * heads if shared else arrays


def _call(
  body: Callable[..., None],
  name: str,
  operands: dict[str, jax.Array],
  results: dict[str, jax.ShapeDtypeStruct],
  *,
  resets: jax.Array | None,
  reverse: bool,
) -> dict[str, jax.Array]:
  """Runs a body over the grid (batch, heads, tiles).

  Args:
    body: Takes the references by name, and tiles and heads per grid step.
    name: Name of the kernel.
    operands: Arrays by name: tiles `[tiles, batch, heads or groups, ...]`, or
      memories `[batch, heads, key, value]`.
    results: Shapes by name, with the same layouts.
    resets: Flags of tiles, int32 `[batch, tiles]`, or None.
    reverse: Whether the grid starts at the last tile.
  """
  num_tiles, batch, num_heads = operands["write"].shape[:3]
  groups = min(operands[name].shape[2] for name in ("key", "query"))
  # Either all heads of a step share a group, or each has its own.
  per_step = num_heads if groups == num_heads else num_heads // groups
  key_dim, value_dim = operands["key"].shape[-1], operands["write"].shape[-1]
  arrays = operands | results

  def scratch(heads):
    return {"carried": pltpu.VMEM((heads, key_dim, value_dim), jnp.float32)}

  def specs(heads, size):
    steps = num_tiles // size

    def at(i):
      return steps - 1 - i if reverse else i

    def spec(x):
      if x.ndim == 4:
        return pl.BlockSpec(
          (1, heads, *x.shape[2:]), lambda b, h, i, *_: (b, h, 0, 0)
        )
      own = x.shape[2] == num_heads
      # `//` would query the TPU's kind, because it rounds down.
      group = (
        (lambda h: h) if own else (lambda h: lax.div(h, per_step // heads))
      )
      block = size, 1, heads if own else 1, *x.shape[3:]
      return pl.BlockSpec(block, lambda b, h, i, *_: (at(i), b, group(h), 0, 0))

    return {name: spec(x) for name, x in arrays.items()}

  def fits(sizes):
    needed = launch.num_bytes(arrays, specs(*sizes), scratch(sizes[0]))
    return needed <= launch.LIMIT

  choices = itertools.product(
    [n for n in range(HEADS, 0, -1) if per_step % n == 0],
    [math.gcd(num_tiles, TILES >> i) for i in range(TILES.bit_length())],
  )
  heads, size = next(filter(fits, choices), (1, 1))
  return launch.run(
    functools.partial(body, size=size, heads=heads),
    name,
    (batch, num_heads // heads, num_tiles // size),
    operands,
    results,
    specs=specs(heads, size),
    scratch=scratch(heads),
    fix=FIX,
    scalars={"resets": resets},
  )


def _operands(tile: affine.Tile) -> dict[str, jax.Array]:
  """Returns what both kernels read of tiles `[tiles, batch, heads, ...]`."""
  width = tile.write.shape[-1]
  total = jnp.broadcast_to(
    tile.total[..., None, None], (*tile.total.shape, 1, width)
  )
  operands = {
    "write": tile.write,
    "erase": tile.erase,
    "key": tile.key,
    "query": tile.query,
    "total": total,
  }
  return {name: x for name, x in operands.items() if x is not None}


def forward(
  tile: affine.Tile,
  memory: jax.Array,
  *,
  resets: jax.Array | None = None,
  reset: jax.Array | None = None,
  save: bool = False,
) -> dict[str, jax.Array]:
  """Runs the forward kernel.

  A is the memory, Q are the queries.

  Args:
    tile: Operands of all tiles, `[tiles, batch, heads, ...]`.
    memory: A before the first tile, `[batch, heads, key, value]`, float32.
    resets: int32 `[batch, tiles]`, nonzero where A becomes `reset` before the
      tile; or None.
    reset: Memory that a segment starts from, shaped as `memory`; not read
      without `resets`.
    save: Whether to return `saved`.

  Returns:
    A dictionary of arrays by name. `read` is Q A, shaped as `tile.write`.
    `final` is A after the last tile. `saved` is A before each tile, `[tiles,
    batch, heads, key, value]`, in the dtype of products.
  """
  given = _operands(tile) | {"memory": memory}
  results = {"read": launch.struct(tile.write), "final": launch.struct(memory)}
  if save:
    shape = tile.write.shape[0], *memory.shape
    results["saved"] = jax.ShapeDtypeStruct(shape, tile.query.dtype)
  if resets is not None and reset is not None:
    given["reset"] = reset
  return _call(
    _forward_body,
    "affine_forward",
    given,
    results,
    resets=resets,
    reverse=False,
  )


def backward(
  tile: affine.Tile,
  saved: jax.Array,
  d_read: jax.Array,
  d_final: jax.Array,
  *,
  resets: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """Runs the backward kernel.

  Args:
    tile: The tiles of `forward`.
    saved: Result `saved` of the forward kernel.
    d_read: Adjoint of its `read`.
    d_final: Adjoint of its `final`.
    resets: The resets of `forward`.

  Returns:
    Adjoints, each named `d_` and its operand's name: of `write`, `erase` (if
    there is one), `key`, `query`, `total`, `memory` and, with `resets`, of
    `reset`. Those of `key` and `query` are by head. That of `query` has the
    dtype of `write`; so has that of `key` if heads share keys.
  """
  given = _operands(tile) | {
    "saved": saved,
    "d_read": d_read,
    "d_final": d_final,
  }
  heads = tile.write.shape[2]

  def of_heads(x, dtype):  # [tiles, batch, groups, ...]
    return jax.ShapeDtypeStruct((*x.shape[:2], heads, *x.shape[3:]), dtype)

  shared = tile.key.shape[2] != heads
  wide = tile.write.dtype
  results = {
    "d_write": launch.struct(tile.write),
    "d_key": of_heads(tile.key, wide if shared else tile.key.dtype),
    # The adjoint of the scale also reads this.
    "d_query": of_heads(tile.query, wide),
    "d_total": launch.struct(given["total"]),
    "d_memory": launch.struct(d_final),
  }
  if tile.erase is not None:
    results["d_erase"] = launch.struct(tile.erase)
  if resets is not None:
    results["d_reset"] = launch.struct(d_final)
  found = _call(
    _backward_body,
    "affine_backward",
    given,
    results,
    resets=resets,
    reverse=True,
  )
  found["d_total"] = jnp.sum(found["d_total"], axis=(-1, -2))
  return found


ENGINE, CHUNK_ENGINE = prepared_engine.engines(forward, backward)


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := launch.unavailable():
    return reason
  if reason := contract.wrong_dtypes(call.inputs, "bfloat16", "float32"):
    return reason
  tiling = call.tiling or form_lib.DEFAULT
  return too_large(call, min(tiling.tile_time, call.inputs.query.shape[1]))


def too_large(call: dispatch.Call, tokens: int) -> str | None:
  """Returns why one tile of one head cannot fit in VMEM, or None if it fits.

  Args:
    call: The call.
    tokens: Tokens per tile.
  """
  inputs = call.inputs
  # Linear attention adds a column.
  columns = inputs.value.shape[-1] + 1
  needed = _needed(tokens, inputs.key.shape[-1], columns, inputs.query.dtype)
  return launch.too_large(needed, "affine_backward", FIX)


@functools.lru_cache(maxsize=1024)
def _needed(tokens: int, key_dim: int, value_dim: int, dtype: Any) -> int:
  """Returns the bytes that the larger kernel needs for a tile of one head."""

  def struct(*shape, dtype=jnp.float32) -> Any:
    return jax.ShapeDtypeStruct((1, 1, *shape), dtype)

  key, value = (
    struct(1, tokens, key_dim, dtype=dtype),
    struct(1, tokens, value_dim),
  )
  tile = affine.Tile(
    write=value,
    erase=key,
    key=key,
    query=key,
    log_scale=None,
    output=value,
    total=struct(1),
  )
  return launch.needed(
    backward,
    tile,
    struct(1, key_dim, value_dim, dtype=dtype),
    value,
    struct(key_dim, value_dim),
    resets=struct(dtype=jnp.int32),
  )
