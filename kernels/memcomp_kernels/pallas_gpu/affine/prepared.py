"""The algebra of `affine` as Pallas GPU kernels.

Only writes depend on one another. So a thread block (one warpgroup) owns some
value columns of one head, which do not depend on other columns. It runs all
tiles in turn and keeps its memory in registers, while it prefetches the next
tile's arrays to shared memory. It stores the memory before each tile. XLA then
computes the reads of all tiles with one matmul.

Backward, one kernel passes the adjoints of memories from tile to tile. A second
kernel has one thread block per tile of each head. It computes all other
adjoints of reads and writes from them. XLA prepares whatever does not depend on
the memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels import affine, contract, dispatch
from memcomp_kernels.chunking import prepared_engine
from memcomp_kernels.pallas_gpu import full_tiles, smem, starts, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed

COLUMNS = 64
"""Value columns per thread block; value dims must be multiples of it."""
KEY_DIMS = 64, 128
_NAME = "memory"
_MEMORIES = (
  *("memory", "reset_memory", "final"),
  *("d_memory", "d_reset_memory", "d_final"),
)
_BY_COLUMNS = (
  *("write", "saved", "d_write", "d_read", "d_after", "d_total"),
  *_MEMORIES,
)
"""Arrays of which a thread block has only its columns."""


def _writes(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
) -> tile_kernel.Carry:
  """Computes one tile's write; see `forward`."""
  memory = starts.reset(refs, scalars, _NAME, carry[0])
  saved, error = refs["saved"], refs["write"][...]
  saved[...] = memory.astype(saved.dtype)
  if "erase" in refs:
    plgpu.commit_smem()
    (erased,) = products([(refs["erase"], saved)])
    error = error - erased
  refs["error"][...] = error.astype(saved.dtype)
  plgpu.commit_smem()
  (written,) = products([(transposed(refs["key"]), refs["error"])])
  return (scalars["total"] * memory + written,)


def _writes_backward(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
) -> tile_kernel.Carry:
  """Computes the adjoint of the memory before one tile, last tile first."""
  (d_memory,) = carry
  d_after = refs["d_after"]
  d_after[...] = d_memory.astype(d_after.dtype)
  into_memory = [(transposed(refs["query"]), refs["d_read"])]
  if "erase" in refs:
    plgpu.commit_smem()
    (d_error,) = products([(refs["key"], d_after)])
    refs["d_erased"][...] = -d_error.astype(d_after.dtype)
    plgpu.commit_smem()
    into_memory.append((transposed(refs["erase"]), refs["d_erased"]))
  (before,) = products(into_memory)
  d_memory = scalars["total"] * d_memory + before
  return (starts.leave_segment(refs, scalars, _NAME, d_memory),)


def _reads_backward(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
) -> tile_kernel.Carry:
  """Computes one tile's adjoints of writes, queries, keys and decay.

  The matmuls run one after the other. Meanwhile, the thread blocks of other
  tiles keep the matrix units busy.
  """
  del scalars
  saved, d_after = refs["saved"], refs["d_after"]
  (d_error,) = products([(refs["key"], d_after)])
  refs["d_write"][...] = d_error
  if "erase" in refs:
    refs["d_erased"][...] = -d_error.astype(saved.dtype)
  (d_query,) = products([(refs["d_read"], transposed(saved))])
  refs["d_query"][...] = d_query
  error = refs["write"][...]
  if "erase" in refs:
    (erased,) = products([(refs["erase"], saved)])
    error = error - erased
  refs["error"][...] = error.astype(saved.dtype)
  plgpu.commit_smem()
  (d_key,) = products([(refs["error"], transposed(d_after))])
  refs["d_key"][...] = d_key.astype(refs["d_key"].dtype)
  if "erase" in refs:
    (d_erase,) = products([(refs["d_erased"], transposed(saved))])
    refs["d_erase"][...] = d_erase.astype(refs["d_erase"].dtype)
  # Split into parts, such that the registers can hold both factors.
  rows, columns = (range(0, size, full_tiles.TOKENS) for size in saved.shape)
  for column in columns:
    d_total = 0.0
    for row in rows:
      part = pl.ds(row, full_tiles.TOKENS), pl.ds(column, full_tiles.TOKENS)
      both = [tile_kernel.wide(x.at[part]) for x in (saved, d_after)]
      d_total += jnp.sum(both[0] * both[1], axis=0)
    refs["d_total"].at[pl.ds(column, full_tiles.TOKENS)][...] = d_total
  return carry


def _call(
  body: tile_kernel.Body,
  name: str,
  operands: dict[str, jax.Array],
  results: dict[str, jax.ShapeDtypeStruct],
  *,
  of: str,
  local: tuple[str, ...],
  columns: int,
  carried: tuple[tuple[str, str], ...] = (),
  reverse: bool = False,
) -> dict[str, jax.Array]:
  """Calls `tile_kernel.run`, which also explains its arguments.

  Args:
    body: Body of the kernel.
    name: Name of the kernel.
    operands: Operands by name.
    results: Shapes of results by name.
    of: Name of the array that holds memories by tile, `[tiles, batch, heads,
      ...]`.
    local: Names of arrays with a tile's tokens and the block's columns, in the
      dtype of the array `of`.
    columns: Columns per thread block.
    carried: Pairs of names of memories.
    reverse: Whether to start at the last tile.
  """
  arrays = {**operands, **results}
  part = jax.ShapeDtypeStruct((full_tiles.TOKENS, columns), arrays[of].dtype)
  return tile_kernel.run(
    body,
    name,
    operands,
    results,
    heads=arrays[of].shape[2],
    memories=[key for key in _MEMORIES if key in arrays],
    carried=carried,
    local=dict.fromkeys(local, part),
    columns=columns,
    by_columns=[key for key in _BY_COLUMNS if key in arrays],
    zeroed=[key for key in ("d_reset_memory",) if key in arrays],
    reverse=reverse,
  )


def _given(
  tile: affine.Tile, *names: str, resets: jax.Array | None = None
) -> dict[str, jax.Array]:
  """Returns arrays of tiles `[tiles, batch, heads, ...]` for the kernels."""
  found = {name: getattr(tile, name) for name in names}
  found = {
    name: full_tiles.fill(x) for name, x in found.items() if x is not None
  }
  if resets is not None:
    found["resets"] = resets.T
  return found


def block_columns(saved: Any) -> int:
  """Returns the number of value columns per thread block.

  It halves them if half of the multiprocessors would otherwise be idle.
  """
  _, batch, heads, _, width = saved.shape
  blocks = batch * heads * width // COLUMNS
  return COLUMNS // 2 if 2 * blocks <= smem.MULTIPROCESSORS else COLUMNS


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
  """Does what `pallas_tpu.affine.prepared.forward` does, on a GPU."""
  given = _given(tile, "write", "key", "erase", resets=resets)
  given |= {"total": tile.total, "memory": memory}
  if resets is not None and reset is not None:
    given["reset_memory"] = reset
  saved = jax.ShapeDtypeStruct(
    (tile.write.shape[0], *memory.shape), tile.query.dtype
  )
  found = _call(
    _writes,
    "affine_writes",
    given,
    {"saved": saved, "final": _struct(memory)},
    of="saved",
    local=("error",),
    columns=block_columns(saved),
    carried=(("memory", "final"),),
  )
  found["read"] = _read(tile.query, found["saved"], tile.write.dtype)
  if not save:
    del found["saved"]
  return found


def _read(query: jax.Array, saved: jax.Array, dtype: Any) -> jax.Array:
  """Reads with all tiles' queries, `[tiles, batch, heads, tile, value]`."""
  by_group = saved.reshape(*query.shape[:3], -1, *saved.shape[3:])
  read = jnp.einsum(
    "...tk,...rkv->...rtv", query, by_group, preferred_element_type=dtype
  )
  return read.reshape(*saved.shape[:3], *read.shape[-2:])


def backward(
  tile: affine.Tile,
  saved: jax.Array,
  d_read: jax.Array,
  d_final: jax.Array,
  *,
  resets: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """Does what `pallas_tpu.affine.prepared.backward` does, on a GPU."""
  heads, width = saved.shape[2], saved.shape[-1]
  tokens, wide = tile.write.shape[3], tile.write.dtype
  erases = tile.erase is not None
  d_read = full_tiles.fill(d_read.astype(saved.dtype))
  given = _given(
    tile, "query", *(("key", "erase") if erases else ()), resets=resets
  )
  results = {"d_after": _struct(saved), "d_memory": _struct(d_final)}
  if resets is not None:
    results["d_reset_memory"] = _struct(d_final)
  found = _call(
    _writes_backward,
    "affine_writes_backward",
    given | {"total": tile.total, "d_read": d_read, "d_final": d_final},
    results,
    of="d_after",
    local=("d_erased",) if erases else (),
    columns=block_columns(saved),
    carried=(("d_final", "d_memory"),),
    reverse=True,
  )
  columns = 2 * COLUMNS if width % (2 * COLUMNS) == 0 else COLUMNS
  blocks = width // columns

  def by_block(x, dtype):
    # Registers must not store rows that are shorter than a sector of global
    # memory, so those arrays get a wider dtype.
    dtype = dtype if blocks == 1 and x.shape[-1] == full_tiles.TOKENS else wide
    shape = *x.shape[:2], heads * blocks, full_tiles.TOKENS, x.shape[-1]
    return jax.ShapeDtypeStruct(shape, dtype)

  shared = tile.key.shape[2] != heads
  results = {
    "d_write": _struct(d_read, wide),
    "d_key": by_block(tile.key, wide if shared else tile.key.dtype),
    # The adjoint of the scale also reads this.
    "d_query": by_block(tile.query, wide),
    "d_total": jax.ShapeDtypeStruct((*tile.total.shape, width), wide),
  }
  given = _given(tile, "write", "key", "erase")
  given |= {"saved": saved, "d_after": found.pop("d_after"), "d_read": d_read}
  if tile.erase is not None:
    results["d_erase"] = by_block(tile.erase, tile.erase.dtype)
  found |= _call(
    _reads_backward,
    "affine_reads_backward",
    given,
    results,
    of="saved",
    local=("error", "d_erased") if erases else ("error",),
    columns=columns,
  )

  def by_head(name, like):
    x = found[name][:, :, :, :tokens]
    if blocks > 1:
      x = x.reshape(*x.shape[:2], heads, blocks, *x.shape[3:])
      x = jnp.sum(x, axis=3)
    return x if name == "d_query" or shared else x.astype(like.dtype)

  if resets is not None:
    found["d_reset"] = found.pop("d_reset_memory")
  found["d_total"] = jnp.sum(found["d_total"], axis=-1)
  found["d_write"] = found["d_write"][:, :, :, :tokens]
  for name in ("key", "query", "erase"):
    if f"d_{name}" in found:
      found[f"d_{name}"] = by_head(f"d_{name}", getattr(tile, name))
  return found


ENGINE, CHUNK_ENGINE = prepared_engine.engines(forward, backward)


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := tile_kernel.unavailable():
    return reason
  inputs = call.inputs
  if reason := contract.wrong_dtypes(inputs, "bfloat16"):
    return reason
  key_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
  if key_dim not in KEY_DIMS:
    return f"key_dim={key_dim} is none of {KEY_DIMS}"
  if value_dim % COLUMNS:
    return f"value_dim={value_dim} is no multiple of {COLUMNS}"
  return None
