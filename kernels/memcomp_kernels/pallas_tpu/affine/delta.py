"""The delta rule over tokens: one tile of one unit, forward and backward.

Rows are tokens, A is the memory before the tile, and a, b, g, w are gates by
token. P is the matrix of the module `outer`. S has the same definition with
keys in place of queries, and only entries before the row (i < r). Then

  (I + S) E = V - diag(e^a) K A
  Y = scale (diag(e^a) Q A + P E)
  A <- total A + K^T diag(w) E
"""

from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels.pallas_tpu import blocks, schedule, triangle
from memcomp_kernels.pallas_tpu.affine import plan as plan_lib
from memcomp_kernels.pallas_tpu.affine import tile as tile_lib


def _solver(
  tile: tile_lib.UnitTile, between: jax.Array
) -> Generator[None, None, jax.Array]:
  """Computes (I + S)^-1 in the dtype of products."""
  shares = between * tile.row("rate") * tile.scores("key")
  shares = jnp.where(tile.earlier, shares, 0.0)
  exact = tile.dtype == jnp.float32
  found = yield from triangle.inverse(shares, tile.plan.unit, exact=exact)
  return found.astype(tile.dtype)


def _errors(tile: tile_lib.UnitTile, solver, from_start, met) -> jax.Array:
  """Returns E; `met` is K A."""
  rest = tile.values("value").astype(jnp.float32) - from_start * met
  return blocks.nn(solver, tile.right(rest))


def forward(tile: tile_lib.UnitTile) -> schedule.Piece:
  """Computes a tile in the forward kernel."""
  query, key = tile.keys("query"), tile.keys("key")
  turned, scores = tile.turned("key"), tile.scores("query")
  between, from_start = tile.between()
  solver = yield from _solver(tile, between)
  shares = (between * tile.row("rate") * scores).astype(tile.dtype)
  left = (turned * tile.row("write")).astype(tile.dtype)
  yield schedule.READS
  memory, start = tile.begin()
  start = tile.right_memory(start)
  met, read = blocks.nn(key, start), blocks.nn(query, start)
  yield None
  written = tile.right(_errors(tile, solver, from_start, met))
  yield None
  tile.end(memory, blocks.nn(left, written))
  yield schedule.WROTE
  output = from_start * read + blocks.nn(shares, written)
  tile.store_values("output", tile.plan.scale * output)


def backward(tile: tile_lib.UnitTile) -> schedule.Piece:
  """Computes a tile in the backward kernel.

  `outer.backward` says how the adjoints of the gates are found.
  """
  wide, dtype, unit = jnp.float32, tile.dtype, tile.plan.unit
  query, key = tile.keys("query"), tile.keys("key")
  memory, start = tile.saved()
  start = tile.right_memory(start)
  scores, couplings = tile.scores("query"), tile.scores("key")
  write = tile.spread("write", tile.plan.value_dim)
  met, read = blocks.nn(key, start), blocks.nn(query, start)
  between, from_start = tile.between()
  solver = yield from _solver(tile, between)
  rate = tile.row("rate")
  d_output = tile.plan.scale * tile.values("d_output").astype(wide)
  written = _errors(tile, solver, from_start, met)
  yield None
  written_right, d_right = tile.right(written), tile.right(d_output)
  d_shares = blocks.nt(d_output.astype(dtype), written_right)
  shares = (between * rate * scores).astype(dtype)
  shares = blocks.transpose(shares, unit)
  solver = blocks.transpose(solver, unit)
  d_read = from_start * d_output
  yield None
  d_written: Any = blocks.nn(shares, d_right)
  d_scores = (between * rate * d_shares).astype(dtype)
  d_query = blocks.nt(d_read.astype(dtype), start)
  d_query = d_query + blocks.nn(d_scores, tile.right_keys(key))
  d_scores = blocks.transpose(d_scores, unit)
  tile.store_keys("d_query", d_query)
  from_start_row = tile.from_start()
  turned = (tile.turned("query") * from_start_row).astype(dtype)
  d_start = blocks.nn(turned, d_right)
  turned = (tile.turned("key") * from_start_row).astype(dtype)
  left = (write * written).astype(dtype)
  yield schedule.READS
  d_after = tile.d_after(memory)
  after = tile.right_memory(d_after)
  left_met = blocks.nn(key, after)
  d_key = blocks.nt(left, after)
  yield None
  d_written = d_written + write * left_met
  d_target = blocks.nn(solver, tile.right(d_written))
  yield None
  d_low = tile.right(d_target)
  tile.d_before(d_after, d_start - blocks.nn(turned, d_low))
  yield schedule.WROTE
  d_met = from_start * d_target
  d_couplings = -blocks.nt(d_target.astype(dtype), written_right)
  d_couplings = jnp.where(tile.earlier, d_couplings, 0.0)
  yield None
  d_key = d_key - blocks.nt(d_met.astype(dtype), start)
  d_key = d_key + blocks.nn(d_scores, tile.right_keys(query))
  per_rate = between * (scores * d_shares + couplings * d_couplings)
  d_rate = jnp.sum(per_rate, axis=0, keepdims=True)
  tile.store_row("rate", d_rate)
  tile.store_row("b", -rate * d_rate)
  both = d_read * read - d_met * met
  tile.store_row("a", tile.sums_of(rate * per_rate, both))
  d_couplings = (between * rate * d_couplings).astype(dtype)
  turned = blocks.transpose(d_couplings, unit).astype(wide)
  d_couplings = (d_couplings.astype(wide) + turned).astype(dtype)
  yield None
  d_key = d_key + blocks.nn(d_couplings, tile.right_keys(key))
  tile.store_row("write", tile.sums(left_met * written))
  tile.store_values("d_value", d_target)
  tile.store_keys("d_key", d_key)


KERNEL = plan_lib.TileKernel(
  "delta", (forward, backward), schedules=((3, 1), (3, 1))
)
