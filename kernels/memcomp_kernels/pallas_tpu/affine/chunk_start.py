"""Memories that are written by chunks, over tokens: one tile of one unit.

The pieces compute a tile forward and backward. Rows are tokens, A is the memory
before the chunk, and w is a gate by token:

  Y = Q A,  E = V - K A, or V unless `Plan.erase`,  A <- total A + K^T diag(w) E
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.pallas_tpu import blocks, schedule
from memcomp_kernels.pallas_tpu.affine import plan as plan_lib
from memcomp_kernels.pallas_tpu.affine import tile as tile_lib


def _written(tile: tile_lib.UnitTile, start: jax.Array) -> jax.Array:
  """Returns E; `start` is the memory that the tile reads, a right operand."""
  value = tile.values("value")
  if not tile.plan.erase:
    return value
  met = blocks.nn(tile.keys("key"), start)
  return (value.astype(jnp.float32) - met).astype(tile.dtype)


def forward(tile: tile_lib.UnitTile) -> schedule.Piece:
  """Computes a tile in the forward kernel."""
  query, turned = tile.keys("query"), tile.turned("key")
  yield None
  left = (turned * tile.row("write")).astype(tile.dtype)
  yield schedule.READS
  memory, start = tile.begin()
  start = tile.right_memory(start)
  output = blocks.nn(query, start)
  written = _written(tile, start)
  yield None
  tile.end(memory, blocks.nn(left, tile.right(written)))
  yield schedule.WROTE
  tile.store_values("output", output)


def backward(tile: tile_lib.UnitTile) -> schedule.Piece:
  """Computes a tile in the backward kernel."""
  wide, plan = jnp.float32, tile.plan
  key, d_output = tile.keys("key"), tile.values("d_output")
  memory, start = tile.saved()
  start = tile.right_memory(start)
  turned = tile.turned("query").astype(tile.dtype)
  write = tile.spread("write", plan.value_dim)
  written = _written(tile, start).astype(wide)
  yield None
  d_start = blocks.nn(turned, tile.right(d_output))
  tile.store_keys("d_query", blocks.nt(d_output, start))
  left = (write * written).astype(tile.dtype)
  if plan.erase:
    turned = tile.turned("key").astype(tile.dtype)
  yield schedule.READS
  d_after = tile.d_after(memory)
  after = tile.right_memory(d_after)
  met = blocks.nn(key, after)
  d_key = blocks.nt(left, after)
  d_written = write * met
  if plan.erase:
    yield None
    d_low = d_written.astype(tile.dtype)
    d_start = d_start - blocks.nn(turned, tile.right(d_low))
    d_key = d_key - blocks.nt(d_low, start)
  tile.d_before(d_after, d_start)
  yield schedule.WROTE
  tile.store_row("write", tile.sums(met * written))
  tile.store_values("d_value", d_written)
  tile.store_keys("d_key", d_key)


KERNEL = plan_lib.TileKernel(
  "by_chunk", (forward, backward), schedules=((2, 1), (3, 2))
)
