"""A chunk of Lattice with gradients at its start, on TPUs' matrix unit.

The pieces compute a chunk forward and backward. The algebra is that of
`lattice.tile`, for normalised columns. A chunk is a tile of
`pallas_tpu.affine.engine`. Its memory has slots on sublanes: `[slots, heads *
value]`. Phi is the memory before the chunk, and S is the memory before the
tile. Numbers by token and slot are `[tile, heads * slots]`. The kernel factors
the decays, e^{G_r - G_i} = e^{G_r} e^{-G_i}, so that

  b_r = e^{G_r} sum_{i<=r} e^{-G_i} w_i p_i
  A_{r,i} = (q_r e^{G_r}) . (w_i e^{-G_i})

are matmuls. The caller checks whether e^{-G} stayed in range.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.lattice import reference
from memcomp_kernels.pallas_tpu import blocks, schedule
from memcomp_kernels.pallas_tpu.affine import plan as plan_lib
from memcomp_kernels.pallas_tpu.affine import tile as tile_lib


class _Chunk(NamedTuple):
  """Intermediate values of a chunk's writes, for both directions.

  Attributes:
    h: `[tile, heads * value]`.
    low: h in the dtype of products.
    share: p = h . Phi.
    code: c.
    rate: gamma.
    plain: a = -gamma c, the factor of the write before the contraction.
    tangent: |h - Phi p|^2.
    total: mu^2 + |ds|^2, or 1 where nothing remains of a column.
    sized: Whether something remains of the column.
    decay: mu^2.
    write: w = beta a.
    log: G.
    up: e^G.
    down: e^-G.
  """

  h: jax.Array
  low: jax.Array
  share: jax.Array
  code: jax.Array
  rate: jax.Array
  plain: jax.Array
  tangent: jax.Array
  total: jax.Array
  sized: jax.Array
  decay: jax.Array
  write: jax.Array
  log: jax.Array
  up: jax.Array
  down: jax.Array

  @property
  def last(self) -> jax.Array:
    """G after the chunk, `[1, heads * slots]`."""
    return self.log[-1:]


def _gates(tile: tile_lib.UnitTile) -> tuple[jax.Array, jax.Array]:
  """Returns log decays and rates of every slot."""
  slots = tile.plan.key_dim
  return tile.spread("log_decay", slots), tile.spread("rate", slots)


def _writes(
  tile: tile_lib.UnitTile, gates: tuple[jax.Array, jax.Array], phi: jax.Array
) -> Generator[None, None, _Chunk]:
  """Computes a chunk's writes; `phi` is Phi as a right operand."""
  wide, objective = jnp.float32, tile.plan.kernel.options.objective
  log_decay, rate = gates
  key, h = tile.keys("key"), tile.values("value").astype(wide)
  decay = jnp.exp(2 * log_decay)
  if objective == "decoding":
    h = blocks.nn(key, phi) - h
    yield None
  elif objective == "similarity":
    h = -h
  low = h.astype(tile.dtype)
  share = blocks.nt(low, phi)
  length = tile.spread_sums(h * h, tile.plan.key_dim)
  yield None
  code = key.astype(wide)
  if objective == "encoding":
    code = share - code
  plain = -rate * code
  # Columns have norm 1 here. Rounding may make the difference negative.
  tangent = jnp.maximum(length - share * share, 0)
  total = decay + plain * plain * tangent
  sized = total > reference.TINY
  total = jnp.where(sized, total, 1)
  write = plain * lax.rsqrt(total)
  log = tile.running_sum(log_decay - 0.5 * jnp.log(total))
  up, down = jnp.exp(log), jnp.exp(-log)
  return _Chunk(
    h,
    low,
    share,
    code,
    rate,
    plain,
    tangent,
    total,
    sized,
    decay,
    write,
    log,
    up,
    down,
  )


def _by_slot(tile: tile_lib.UnitTile, row: jax.Array) -> jax.Array:
  """Spreads each slot's number, `[1, heads * slots]`, over the slot's lanes."""
  return blocks.by_token(row, tile.plan.unit, tile.plan.value_dim)


def _scores(tile: tile_lib.UnitTile, chunk: _Chunk, query: jax.Array):
  """Returns A (zero for later tokens), q e^G and w e^-G."""
  dtype = tile.dtype
  query = (query * chunk.up).astype(dtype)
  write = (chunk.write * chunk.down).astype(dtype)
  scores = blocks.nt(query, tile.right_keys(write))
  return jnp.where(tile.seen, scores, 0.0).astype(dtype), query, write


def _ratio(tile: tile_lib.UnitTile, chunk: _Chunk) -> jax.Array:
  """Returns the factor of q e^G in the read of `Phi`."""
  return tile.running_sum(chunk.down * chunk.write * chunk.share)


def _after(
  tile: tile_lib.UnitTile, chunk: _Chunk, memory: jax.Array, phi: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns S after the writes, its factors of S and Phi, and w e^{G_C - G}.

  `memory` is `phi` itself if no chunk began before the call. The factor of S
  then includes that of Phi.
  """
  left = chunk.write * jnp.exp(chunk.last - chunk.log)
  kept = jnp.exp(chunk.last)
  along = jnp.sum(left * chunk.share, axis=0, keepdims=True)
  if memory is phi:
    kept = _by_slot(tile, kept - along)
    held = kept * phi
  else:
    kept, along = _by_slot(tile, kept), _by_slot(tile, along)
    held = kept * memory - along * phi
  left = left.astype(tile.dtype)
  turned = blocks.transpose(left, tile.plan.unit)
  written = blocks.nn(turned, tile.right(chunk.low))
  return held + written, kept, along, left


def _norms(tile: tile_lib.UnitTile, memory: jax.Array):
  """Returns inverse norms on all lanes of columns, and which have a norm."""
  squares = tile.spread_sums(memory * memory, tile.plan.value_dim)
  sized = squares > reference.TINY
  return lax.rsqrt(jnp.where(sized, squares, 1)), sized


def _if_complete(tile: tile_lib.UnitTile, new: jax.Array, old: Any):
  """Returns `new` if the chunk ends with the tile, otherwise `old`."""
  if tile.flags is None:
    return new
  return jnp.where(tile.has(layout_lib.COMPLETE), new, old)


def forward(tile: tile_lib.UnitTile) -> schedule.Piece:
  """Computes a chunk in the forward kernel."""
  query, gates = tile.keys("query").astype(jnp.float32), _gates(tile)
  yield schedule.READS
  memory, phi = tile.begin()
  right = tile.right_memory(phi)
  chunk = yield from _writes(tile, gates, right)
  tile.note_lowest(chunk.last)
  after, _, _, _ = _after(tile, chunk, memory, phi)
  yield None
  inverse, sized = _norms(tile, after)
  yield None
  finished = jnp.where(sized, inverse * after, phi)
  tile.hand_on(_if_complete(tile, finished, after))
  yield schedule.WROTE
  scores, _, _ = _scores(tile, chunk, query)
  from_start, ratio = query * chunk.up, _ratio(tile, chunk)
  if memory is phi:
    from_start = (from_start * (1 - ratio)).astype(tile.dtype)
    output = blocks.nn(from_start, right)
  else:
    along = (from_start * ratio).astype(tile.dtype)
    read = tile.right_memory(memory)
    output = blocks.nn(from_start.astype(tile.dtype), read)
    output = output - blocks.nn(along, right)
  yield None
  output = output + blocks.nn(scores, tile.right(chunk.low))
  tile.store_values("output", output)


def backward(tile: tile_lib.UnitTile) -> schedule.Piece:
  """Computes a chunk in the backward kernel."""
  wide, dtype, plan = jnp.float32, tile.dtype, tile.plan
  unit, value_dim = plan.unit, plan.value_dim
  objective = tile.plan.kernel.options.objective
  query = tile.keys("query").astype(wide)
  d_output = tile.values("d_output")
  memory, phi = tile.saved()
  is_one = memory is phi
  right = tile.right_memory(phi)
  chunk = yield from _writes(tile, _gates(tile), right)
  up, down, write = chunk.up, chunk.down, chunk.write
  ratio = _ratio(tile, chunk)
  scores, late, early = _scores(tile, chunk, query)
  memory = memory.astype(wide)
  phi = memory if is_one else phi.astype(wide)
  after, kept, along, left = _after(tile, chunk, memory, phi)
  yield None
  inverse, sized = _norms(tile, after)
  low_right, d_right = tile.right(chunk.low), tile.right(d_output)
  d_scores = jnp.where(tile.seen, blocks.nt(d_output, low_right), 0.0)
  d_scores = d_scores.astype(dtype)
  d_h: Any = blocks.nn(blocks.transpose(scores, unit), d_right)
  # The adjoints of the reads of the memory and of Phi.
  d_along = blocks.nt(d_output, right)
  read = d_along
  if not is_one:
    read = blocks.nt(d_output, tile.right_memory(memory))
  yield None
  read = read + blocks.nn(d_scores, tile.right_keys(early))
  met = blocks.nn(blocks.transpose(d_scores, unit), tile.right_keys(late))
  normal = inverse * after
  b = up * ratio
  tile.store_keys("d_query", up * read - b * d_along)
  d_log = query * (up * read - b * d_along)
  by_read = (query * up).astype(dtype)
  by_along = (query * b).astype(dtype)
  if is_one:
    by_read = (query * (up - b)).astype(dtype)
  d_memory = blocks.nn(blocks.transpose(by_read, unit), d_right)
  d_phi: Any = 0.0
  if not is_one:
    d_phi = -blocks.nn(blocks.transpose(by_along, unit), d_right)
  d_ratio = -up * query * d_along
  yield schedule.READS
  d_after = tile.carried()
  inner = tile.spread_sums(normal * d_after, value_dim)
  yield None
  d_normal = jnp.where(sized, inverse * (d_after - normal * inner), 0.0)
  d_phi = d_phi + _if_complete(tile, jnp.where(sized, 0.0, d_after), 0.0)
  d_after = _if_complete(tile, d_normal, d_after)
  right_after = tile.right_memory(d_after)
  d_left = blocks.nt(chunk.low, right_after)
  d_h = d_h + blocks.nn(left, right_after)
  d_kept = tile.sums(memory * d_after)
  d_end = d_kept if is_one else tile.sums(phi * d_after)
  yield None
  last = lax.broadcasted_iota(jnp.int32, (plan.tile, 1), 0) == plan.tile - 1
  d_ratio = d_ratio - jnp.where(last, up * d_end, 0.0)
  # The adjoint of G through b; its factor e^G is in `up`.
  d_log = d_log - jnp.where(last, b * d_end, 0.0)
  d_sum = tile.running_sum(d_ratio, reverse=True)
  yield None
  to_end = jnp.exp(chunk.last - chunk.log)
  d_write = down * (met + chunk.share * d_sum) + to_end * d_left
  d_share = down * write * d_sum
  d_log = d_log - write * d_write
  d_last = jnp.exp(chunk.last) * d_kept
  d_last = d_last + jnp.sum(write * to_end * d_left, 0, keepdims=True)
  d_log = tile.running_sum(d_log, reverse=True) + d_last
  yield None
  by_beta = d_log + write * d_write
  d_total = jnp.where(chunk.sized, -0.5 * by_beta / chunk.total, 0.0)
  d_plain = d_write * lax.rsqrt(chunk.total)
  d_plain = d_plain + 2 * chunk.plain * chunk.tangent * d_total
  d_tangent = chunk.plain * chunk.plain * d_total
  d_tangent = jnp.where(chunk.tangent > 0, d_tangent, 0.0)
  d_share = d_share - 2 * chunk.share * d_tangent
  d_squares = chunk.share * chunk.share * d_tangent
  d_squares = jnp.sum(d_squares, axis=0, keepdims=True)
  d_code = -chunk.rate * d_plain
  d_key = d_code
  if objective == "encoding":
    d_share, d_key = d_share + d_code, -d_code
  d_low = d_share.astype(dtype)
  d_h = d_h + 2 * chunk.h * tile.spread_sums(d_tangent, value_dim)
  d_h = d_h + blocks.nn(d_low, right)
  d_phi = d_phi + blocks.nn(blocks.transpose(d_low, unit), low_right)
  d_phi = d_phi + 2 * _by_slot(tile, d_squares) * phi
  d_memory = d_memory + kept * d_after
  if not is_one:
    d_phi = d_phi - along * d_after
  yield None
  if objective == "decoding":
    low = d_h.astype(dtype)
    d_key = d_key + blocks.nt(low, right)
    turned = tile.turned("key").astype(dtype)
    d_phi = d_phi + blocks.nn(turned, tile.right(low))
  tile.hand_back(d_memory, d_phi)
  yield schedule.WROTE
  tile.store_values("d_value", d_h if objective == "encoding" else -d_h)
  tile.store_keys("d_key", d_key)
  tile.store_row("rate", tile.sums(-chunk.code * d_plain))
  d_log_decay = d_log + 2 * chunk.decay * d_total
  tile.store_row("log_decay", tile.sums(d_log_decay))


def kernel(spec: reference.Spec) -> plan_lib.TileKernel:
  """Returns the kernel of a memory with these options."""
  return plan_lib.TileKernel(
    "lattice_chunk",
    (forward, backward),
    schedules=((6, 1), (6, 1)),
    step_tiles=(4, 2),
    factors_decays=True,
    options=spec,
  )
