"""`primitives.affine` as Pallas GPU kernels: the memory stays in registers.

A block of threads (one warpgroup) owns 64 value columns of one head, which
need no others: it takes all tiles in turn, while the next tile's arrays are on
their way to shared memory. What needs no memory is prepared before, by XLA, for
all tiles at once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.primitives import affine
from memcomp_kernels.primitives.mosaic_gpu import modes, smem, stream
from memcomp_kernels.primitives.mosaic_gpu.products import (
  products,
  transposed,
)

COLUMNS = 64
"""Of values, a block of threads."""
KEY_DIMS = 64, 128
TOKENS = 64
"""Of a tile: rows of a matrix unit's product. Shorter tiles are filled up."""
_BY_COLUMNS = {
  *("write", "read", "memory", "reset", "final", "saved"),
  *("d_write", "d_read", "d_memory", "d_reset", "d_final", "d_total"),
}
"""Arrays of which a block of threads has its columns only."""


def _forward_body(
  refs: dict[str, Any], scalars: dict[str, jax.Array], memory: jax.Array
) -> jax.Array:
  """One tile of the forward kernel; see `forward`."""
  if "resets" in scalars:
    memory = lax.cond(
      scalars["resets"] != 0,
      lambda _: _load(refs["reset"]),
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
  return scalars["total"] * memory + written


def _backward_body(
  refs: dict[str, Any], scalars: dict[str, jax.Array], d_after: jax.Array
) -> jax.Array:
  """One tile of the backward kernel, from the last tile on."""
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
    return d_memory

  def reset(d_memory):
    refs["d_reset"][...] = _load(refs["d_reset"]) + d_memory
    return jnp.zeros_like(d_memory)

  return lax.cond(
    scalars["resets"] != 0, reset, lambda d_memory: d_memory, d_memory
  )


def _load(ref: Any) -> jax.Array:
  """A memory from the device's memory, as matrix units hold results."""
  return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)


def _call(
  body: Callable[..., jax.Array],
  name: str,
  operands: dict[str, jax.Array],
  results: dict[str, jax.ShapeDtypeStruct],
  *,
  carried: tuple[str, str],
  reverse: bool,
) -> dict[str, jax.Array]:
  """Runs a body over the tiles of all heads and blocks of value columns.

  Args:
    body: (references by name, scalars by name, the carried array) -> the
      carried array after the tile.
    name: of the kernel.
    operands: by tile `[tiles, batch, heads, tile, value]`, `[tiles, batch,
      groups, tile, key]`, `total` `[tiles, batch, heads]`, `resets` `[tiles,
      batch]`; memories `[batch, heads, key, value]`.
    results: likewise, and `d_total` `[tiles, batch, heads, value]`; in place of
      groups, blocks of value columns within heads.
    carried: the operand that the carried array starts as, and the result that
      it is at the end.
    reverse: whether tiles are taken from the last one on.
  """
  arrays = operands | results
  num_tiles, batch, heads, tokens, width = arrays["write"].shape
  blocks = width // COLUMNS
  key_dim, dtype = arrays["key"].shape[-1], arrays["key"].dtype
  inside = {
    "low": jax.ShapeDtypeStruct((key_dim, COLUMNS), dtype),
    "error": jax.ShapeDtypeStruct((tokens, COLUMNS), dtype),
  }
  if reverse and "erase" in operands:
    inside["d_erased"] = inside["error"]
  by_tile = {
    key: (*x.shape[3:-1], COLUMNS if key in _BY_COLUMNS else x.shape[-1])
    for key, x in arrays.items()
    if x.ndim == 5 or key == "d_total"
  }
  parts = {
    key: jax.ShapeDtypeStruct(shape, arrays[key].dtype)
    for key, shape in by_tile.items()
  }
  slots, out_slots = smem.slots(
    [x for key, x in parts.items() if key in operands],
    [x for key, x in parts.items() if key in results],
    inside.values(),
    name,
  )
  held = {key: slots if key in operands else out_slots for key in parts}
  buffers = {
    key: smem.buffer((held[key], *x.shape), x.dtype)
    for key, x in parts.items()
    if held[key]
  }
  first, last = carried

  def kernel(*refs):
    *refs, buffers, local, arrived = refs
    refs = dict(zip(arrays, refs, strict=True))
    row, lane = lax.axis_index("row"), lax.axis_index("lane")
    head, block = lax.div(lane, jnp.int32(blocks)), lax.rem(lane, blocks)

    def tile(step):
      return num_tiles - 1 - step if reverse else step

    def part(key, *at):
      if key in _BY_COLUMNS:
        inner = [slice(None)] * (len(arrays[key].shape) - len(at) - 2)
        columns = pl.ds(block * COLUMNS, COLUMNS)
        return refs[key].at[(*at, head, *inner, columns)]
      shared_by = heads * blocks // arrays[key].shape[2]
      return refs[key].at[(*at, lax.div(lane, jnp.int32(shared_by)))]

    def streams(of):
      return {
        key: stream.Stream(
          lambda step, key=key: part(key, tile(step), row), buffers[key]
        )
        for key in buffers
        if key in of
      }

    memories = {key: part(key, row) for key, x in arrays.items() if x.ndim == 4}

    def one(step, parts, carry):
      at = tile(step), row, head
      scalars = {
        key: refs[key][at[: arrays[key].ndim]]
        for key in ("total", "resets")
        if key in arrays
      }
      direct = {
        key: part(key, tile(step), row) for key in by_tile if key not in parts
      }
      return body(memories | local | direct | parts, scalars, carry)

    if "d_reset" in memories:
      memories["d_reset"][...] = jnp.zeros((key_dim, COLUMNS), jnp.float32)
    memories[last][...] = stream.run(
      one,
      _load(memories[first]),
      steps=num_tiles,
      inputs=streams(operands),
      outputs=streams(results),
      arrived=arrived,
    )

  outputs = plgpu.kernel(
    kernel,
    out_type=list(results.values()),
    scratch_types=[
      buffers,
      {key: smem.buffer(x.shape, x.dtype) for key, x in inside.items()},
      plgpu.Barrier(
        num_arrivals=sum(key in operands for key in parts),
        num_barriers=slots,
      ),
    ],
    grid=(batch, heads * blocks),
    grid_names=("row", "lane"),
    interpret=modes.interpret(),
  )(*operands.values())
  return dict(zip(results, outputs, strict=True))


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
