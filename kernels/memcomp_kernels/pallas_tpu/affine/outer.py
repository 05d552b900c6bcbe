"""Decayed sums of outer products over tokens: one tile of one unit.

The pieces compute a tile forward and backward. Rows are tokens, A is the memory
before the tile, and a, b, g, w are gates by token:

  Y = diag(e^a) Q A + P V + diag(skip) V
  P_{ri} = e^{a_r - b_i} g_i (q_r . k_i)
  A <- total A + K^T diag(w) V

Row r reads the writes of tokens i <= r, or i < r if `Plan.read` is "before".
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.pallas_tpu import blocks, schedule
from memcomp_kernels.pallas_tpu.affine import plan as plan_lib
from memcomp_kernels.pallas_tpu.affine import tile as tile_lib


def _with_skip(tile: tile_lib.UnitTile, shares: jax.Array) -> jax.Array:
  if not tile.plan.skip:
    return shares
  return jnp.where(tile.own, shares + tile.row("skip"), shares)


def forward(tile: tile_lib.UnitTile) -> schedule.Piece:
  """Computes a tile in the forward kernel."""
  query, value = tile.keys("query"), tile.right(tile.values("value"))
  turned, scores = tile.turned("key"), tile.scores("query")
  between, from_start = tile.between()
  yield None
  written = (turned * tile.row("write")).astype(tile.dtype)
  shares = _with_skip(tile, between * tile.row("rate") * scores)
  yield None
  written = blocks.nn(written, value)
  output = blocks.nn(shares.astype(tile.dtype), value)
  yield schedule.READS
  memory, start = tile.begin()
  read = blocks.nn(query, tile.right_memory(start))
  tile.end(memory, written)
  yield schedule.WROTE
  tile.store_values("output", from_start * read + output)


def backward(tile: tile_lib.UnitTile) -> schedule.Piece:
  """Computes a tile in the backward kernel.

  No gate's adjoint needs a matmul of its own. What a token reads is linear in
  e^a, and what it writes is linear in e^{-b} g and in w.
  """
  wide, dtype, unit = jnp.float32, tile.dtype, tile.plan.unit
  query, key = tile.keys("query"), tile.keys("key")
  value, d_output = tile.values("value"), tile.values("d_output")
  memory, start = tile.saved()
  start, d_right = tile.right_memory(start), tile.right(d_output)
  turned, scores = tile.turned("query"), tile.scores("query")
  write = tile.spread("write", tile.plan.value_dim)
  d_shares = blocks.nt(d_output, tile.right(value))
  read = blocks.nn(query, start)
  between, from_start = tile.between()
  yield None
  rate = tile.row("rate")
  d_read = from_start * d_output.astype(wide)
  per_rate = between * scores * d_shares
  d_rate = jnp.sum(per_rate, axis=0, keepdims=True)
  tile.store_row("rate", d_rate)
  tile.store_row("b", -rate * d_rate)
  along, read = rate * per_rate, d_read * read
  d_read = d_read.astype(dtype)
  between = between * rate
  shares = _with_skip(tile, between * scores).astype(dtype)
  d_scores = (between * d_shares).astype(dtype)
  if tile.plan.skip:
    own = jnp.where(tile.own, d_shares, 0.0)
    tile.store_row("skip", jnp.sum(own, axis=0, keepdims=True))
  turned = (turned * tile.from_start()).astype(dtype)
  written = (write * value.astype(wide)).astype(dtype)
  yield None
  d_start = blocks.nn(turned, d_right)
  d_query = blocks.nt(d_read, start)
  d_query = d_query + blocks.nn(d_scores, tile.right_keys(key))
  tile.store_row("a", tile.sums_of(along, read))
  shares = blocks.transpose(shares, unit)
  d_scores = blocks.transpose(d_scores, unit)
  tile.store_keys("d_query", d_query)
  yield None
  d_value = blocks.nn(shares, d_right)
  d_key = blocks.nn(d_scores, tile.right_keys(query))
  yield schedule.READS
  d_after = tile.d_after(memory)
  after = tile.right_memory(d_after)
  met = blocks.nn(key, after)
  d_left = blocks.nt(written, after)
  tile.d_before(d_after, d_start)
  yield schedule.WROTE
  tile.store_row("write", tile.sums(met * value.astype(wide)))
  tile.store_values("d_value", write * met + d_value)
  tile.store_keys("d_key", d_left + d_key)


KERNEL = plan_lib.TileKernel(
  "outer", (forward, backward), schedules=((3, 1), (6, 1))
)
