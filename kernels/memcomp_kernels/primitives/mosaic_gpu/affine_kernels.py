"""`primitives.affine` as Pallas GPU kernels: the memory stays in registers.

A block of threads (one warpgroup) owns 64 value columns of one head, which
need no others: it takes all tiles in turn, while the next tile's arrays are on
their way to shared memory. What needs no memory is prepared before, by XLA, for
all tiles at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.primitives import affine
from memcomp_kernels.primitives.mosaic_gpu import tile_kernel
from memcomp_kernels.primitives.mosaic_gpu.products import (
  products,
  transposed,
)

COLUMNS = 64
"""Of values, a block of threads."""
KEY_DIMS = 64, 128
TOKENS = 64
"""Of a tile: rows of a matrix unit's product. Shorter tiles are filled up."""
_MEMORIES = "memory", "reset", "final", "d_memory", "d_reset", "d_final"
_BY_COLUMNS = (
  *("write", "read", "saved", "d_write", "d_read", "d_total"),
  *_MEMORIES,
)
"""Arrays of which a block of threads has its columns only."""


def _forward_body(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
) -> tile_kernel.Carry:
  """One tile of the forward kernel; see `forward`."""
  (memory,) = carry
  if "resets" in scalars:
    memory = lax.cond(
      scalars["resets"] != 0,
      lambda _: tile_kernel.load(refs["reset"]),
      lambda memory: memory,
      memory,
    )
  low = refs["low"]
  low[...] = memory.astype(low.dtype)
  if "saved" in refs:
    refs["saved"][...] = memory.astype(low.dtype)
  plgpu.commit_smem()
  error = refs["write"][...]
  if "erase" in refs:
    read, erased = products([(refs["query"], low)], [(refs["erase"], low)])
    error = error - erased
  else:
    (read,) = products([(refs["query"], low)])
  refs["read"][...] = read
  refs["error"][...] = error.astype(low.dtype)
  plgpu.commit_smem()
  (written,) = products([(transposed(refs["key"]), refs["error"])])
  return (scalars["total"] * memory + written,)


def _backward_body(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
) -> tile_kernel.Carry:
  """One tile of the backward kernel, from the last tile on.

  `d_reset` is zeros before the first, and is added up in place.
  """
  (d_after,) = carry
  low, d_low, d_read = refs["saved"], refs["low"], refs["d_read"]
  d_low[...] = d_after.astype(low.dtype)
  plgpu.commit_smem()
  first = [
    [(refs["key"], d_low)],
    [(d_read, transposed(low))],
  ]
  error = refs["write"][...]
  if "erase" in refs:
    d_error, d_query, erased = products(*first, [(refs["erase"], low)])
    error = error - erased
  else:
    d_error, d_query = products(*first)
  refs["d_write"][...] = d_error
  refs["d_query"][...] = d_query
  refs["error"][...] = error.astype(low.dtype)
  into_memory = [(transposed(refs["query"]), d_read)]
  second = [into_memory, [(refs["error"], transposed(d_low))]]
  if "erase" in refs:
    erased = refs["d_erased"]
    erased[...] = -d_error.astype(low.dtype)
    into_memory.append((transposed(refs["erase"]), erased))
    second.append([(erased, transposed(low))])
  plgpu.commit_smem()
  written, d_key, *d_erase = products(*second)
  refs["d_key"][...] = d_key.astype(refs["d_key"].dtype)
  if d_erase:
    refs["d_erase"][...] = d_erase[0].astype(refs["d_erase"].dtype)
  wide = low[...].astype(jnp.float32)
  refs["d_total"][...] = jnp.sum(wide * d_after, axis=0)
  d_memory = scalars["total"] * d_after + written
  if "resets" not in scalars:
    return (d_memory,)

  def reset(d_memory):
    refs["d_reset"][...] = tile_kernel.load(refs["d_reset"]) + d_memory
    return jnp.zeros_like(d_memory)

  d_memory = lax.cond(
    scalars["resets"] != 0, reset, lambda d_memory: d_memory, d_memory
  )
  return (d_memory,)


def _call(
  body: tile_kernel.Body,
  name: str,
  operands: dict[str, jax.Array],
  results: dict[str, jax.ShapeDtypeStruct],
  *,
  carried: tuple[str, str],
  reverse: bool,
) -> dict[str, jax.Array]:
  """As `tile_kernel.run`."""
  heads, tokens = operands["write"].shape[2:4]
  key_dim, dtype = operands["key"].shape[-1], operands["key"].dtype
  local = {
    "low": jax.ShapeDtypeStruct((key_dim, COLUMNS), dtype),
    "error": jax.ShapeDtypeStruct((tokens, COLUMNS), dtype),
  }
  if reverse and "erase" in operands:
    local["d_erased"] = local["error"]
  names = operands.keys() | results.keys()
  return tile_kernel.run(
    body,
    name,
    operands,
    results,
    heads=heads,
    memories=[key for key in _MEMORIES if key in names],
    carried=[carried],
    local=local,
    columns=COLUMNS,
    by_columns=[key for key in _BY_COLUMNS if key in names],
    zeroed=[key for key in ("d_reset",) if key in names],
    reverse=reverse,
  )


def _full(x: jax.Array) -> jax.Array:
  """Fills tiles `[tiles, batch, heads, tile, ...]` up with empty places."""
  missing = TOKENS - x.shape[3]
  if missing < 0:
    raise NotImplementedError(
      f"affine mosaic_gpu: a tile of {x.shape[3]} tokens is longer than "
      f"{TOKENS}; take a shorter one (Tiling.tile_time)"
    )
  if not missing:
    return x
  return jnp.pad(x, [(0, 0)] * 3 + [(0, missing), (0, 0)])


def _operands(
  tile: affine.Tile, resets: jax.Array | None
) -> dict[str, jax.Array]:
  """What both kernels read of tiles `[tiles, batch, heads, ...]`."""
  operands = {
    "write": _full(tile.write),
    "key": _full(tile.key),
    "query": _full(tile.query),
    "total": tile.total,
  }
  if tile.erase is not None:
    operands["erase"] = _full(tile.erase)
  if resets is not None:
    operands["resets"] = resets.T
  return operands


def _struct(x: jax.Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def forward(
  tile: affine.Tile,
  memory: jax.Array,
  *,
  resets: jax.Array | None = None,
  reset: jax.Array | None = None,
  save: bool = False,
) -> dict[str, jax.Array]:
  """As `primitives.mosaic.affine_kernels.forward`, on a GPU."""
  given = _operands(tile, resets) | {"memory": memory}
  if resets is not None and reset is not None:
    given["reset"] = reset
  results = {"read": _struct(given["write"]), "final": _struct(memory)}
  if save:
    shape = tile.write.shape[0], *memory.shape
    results["saved"] = jax.ShapeDtypeStruct(shape, tile.query.dtype)
  found = _call(
    _forward_body,
    "affine_forward",
    given,
    results,
    carried=("memory", "final"),
    reverse=False,
  )
  found["read"] = found["read"][:, :, :, : tile.write.shape[3]]
  return found


def backward(
  tile: affine.Tile,
  saved: jax.Array,
  d_read: jax.Array,
  d_final: jax.Array,
  *,
  resets: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """As `primitives.mosaic.affine_kernels.backward`, on a GPU."""
  given = _operands(tile, resets) | {
    "saved": saved,
    "d_read": _full(d_read.astype(saved.dtype)),
    "d_final": d_final,
  }
  heads, width = tile.write.shape[2], tile.write.shape[-1]
  blocks, wide = width // COLUMNS, tile.write.dtype

  def by_block(name, dtype):
    x = given[name]
    # Rows of fewer bytes than a sector of the device's memory, which its
    # registers would write, are not.
    dtype = dtype if blocks == 1 and x.shape[-1] == TOKENS else wide
    shape = *x.shape[:2], heads * blocks, *x.shape[3:]
    return jax.ShapeDtypeStruct(shape, dtype)

  shared = tile.key.shape[2] != heads
  results = {
    "d_write": _struct(given["write"]),
    "d_key": by_block("key", wide if shared else tile.key.dtype),
    # Read again, for the adjoint of the scale.
    "d_query": by_block("query", wide),
    "d_total": jax.ShapeDtypeStruct((*tile.total.shape, width), wide),
    "d_memory": _struct(d_final),
  }
  if tile.erase is not None:
    results["d_erase"] = by_block("erase", tile.erase.dtype)
  if resets is not None:
    results["d_reset"] = _struct(d_final)
  found = _call(
    _backward_body,
    "affine_backward",
    given,
    results,
    carried=("d_final", "d_memory"),
    reverse=True,
  )

  def by_head(name, like):
    x = found[name][:, :, :, : like.shape[3]]
    if blocks > 1:
      x = x.reshape(*x.shape[:2], heads, blocks, *x.shape[3:])
      x = jnp.sum(x, axis=3)
    return x if name == "d_query" or shared else x.astype(like.dtype)

  found["d_total"] = jnp.sum(found["d_total"], axis=-1)
  found["d_write"] = found["d_write"][:, :, :, : tile.write.shape[3]]
  for name in ("key", "query", "erase"):
    if f"d_{name}" in found:
      found[f"d_{name}"] = by_head(f"d_{name}", getattr(tile, name))
  return found
