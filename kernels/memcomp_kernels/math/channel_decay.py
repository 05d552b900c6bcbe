"""Decay with a rate per channel, along a tile, without overflow.

A channel is anything with a decay of its own: a slot, or a feature of a key.
G is the running sum of log decays <= 0, per token and channel. The share of
write i at token r is exp(G_r - G_i), one number per channel. So the scores

  A_{r,i} = sum_m q_{r,m} a_{i,m} exp(G_{r,m} - G_{i,m}),   i <= r

are not a matrix product as they stand, and the usual split exp(G_r) exp(-G_i)
overflows on long tiles. A tile is therefore cut into blocks. Within a block,
shares are computed for every pair of tokens. Between two blocks, with g the sum
before the reading block,

  exp(G_r - G_i) = exp(G_r - g) exp(g - G_i),   both exponents <= 0.

So each block scales the earlier tokens with factors of its own. All masks are
applied before the exp.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.math import decay
from memcomp_kernels.options import at_least, option, options


@options
class Tiling:
  """Tile and block sizes of the chunk form. They never change results.

  A call without a tiling uses the op's own sizes, which may differ from these
  defaults.

  Attributes:
    tile_time: tokens per tile, a multiple of `block_time`.
    block_time: tokens per block. Within a block, decays are computed for every
      pair of tokens and every channel. Tokens of different blocks interact
      through matrix products.
  """

  tile_time: int = option(32, at_least(1))
  block_time: int = option(16, at_least(1))

  def __post_init__(self):
    if self.tile_time % self.block_time:
      raise ValueError(
        f"tile_time={self.tile_time} must be a multiple of"
        f" block_time={self.block_time}"
      )


DEFAULT = Tiling()


def tile_time(tiling: Tiling, time: int) -> int:
  """Returns tokens per tile; no more than a call of `time` tokens needs."""
  blocks = -(-time // tiling.block_time)
  return min(tiling.tile_time, blocks * tiling.block_time)


class ChannelDecay(NamedTuple):
  """Shares along a tile of `time` tokens in blocks of `block` tokens.

  Attributes:
    from_start: exp(G_r - G_0), `[..., time, channels]`.
    to_end: exp(G_C - G_i), `[..., time, channels]`.
    total: exp(G_C - G_0), `[..., channels]`.
    within: exp(G_r - G_i), `[..., blocks, block, block, channels]`, zero for
      i > r.
    from_block: exp(G_r - g), `[..., blocks, block, channels]`.
    to_block: exp(g - G_i), `[..., blocks, time, channels]`, zero unless i is
      before the block; None if there is only one block.
  """

  from_start: jax.Array
  to_end: jax.Array
  total: jax.Array
  within: jax.Array
  from_block: jax.Array
  to_block: jax.Array | None


def channel_decay(log_decay: jax.Array, block: int) -> ChannelDecay:
  """Returns the shares; `log_decay` is `[..., time, channels]`, <= 0.

  `block` must divide the time.
  """
  sums = decay.running_sums(log_decay, axis=-2)
  start = jnp.zeros_like(log_decay[..., 0, :])
  parts = [_differences(start, part, block) for part in sums]
  return _exp(jax.tree.map(jnp.add, *parts))


def of_sums(start: jax.Array, sums: jax.Array, block: int) -> ChannelDecay:
  """Returns the shares for a given G, which must not increase with time.

  Args:
    start: G_0, `[..., channels]`.
    sums: G, `[..., time, channels]`.
    block: tokens per block; must divide the time.
  """
  return _exp(_differences(start, sums, block))


def _differences(start, sums, block: int) -> ChannelDecay:
  """Returns the logs of the shares, without masks."""
  before = jnp.concatenate([start[..., None, :], sums[..., :-1, :]], axis=-2)
  blocked = into_blocks(sums, block)
  before = into_blocks(before, block)[..., :1, :]
  last = sums[..., -1:, :]
  return ChannelDecay(
    from_start=sums - start[..., None, :],
    to_end=last - sums,
    total=last[..., 0, :] - start,
    within=blocked[..., :, None, :] - blocked[..., None, :, :],
    from_block=blocked - before,
    to_block=before - sums[..., None, :, :] if sums.shape[-2] > block else None,
  )


def _exp(logs: ChannelDecay) -> ChannelDecay:
  """Returns the shares from their logs, masked where they are not read."""
  *_, blocks, block, _ = logs.from_block.shape
  causal = jnp.tril(jnp.ones((block, block), bool))[..., None]
  to_block = None
  if logs.to_block is not None:
    first = block * jnp.arange(blocks)[:, None, None]
    earlier = jnp.arange(blocks * block)[:, None] < first
    to_block = decay.masked_exp(earlier, logs.to_block)
  return ChannelDecay(
    from_start=jnp.exp(logs.from_start),
    to_end=jnp.exp(logs.to_end),
    total=jnp.exp(logs.total),
    within=decay.masked_exp(causal, logs.within),
    from_block=jnp.exp(logs.from_block),
    to_block=to_block,
  )


def into_blocks(x: jax.Array, block: int) -> jax.Array:
  """Reshapes `[..., time, dim]` to `[..., blocks, block, dim]`."""
  return x.reshape(*x.shape[:-2], -1, block, x.shape[-1])


def running_sum(factors: ChannelDecay, writes: jax.Array) -> jax.Array:
  """Returns sum_{i <= r} exp(G_r - G_i) writes_i, channel by channel.

  Args:
    factors: shares of the tile.
    writes: `[..., time, channels]`.
  """
  block = factors.within.shape[-2]
  blocked = into_blocks(writes, block)
  total = jnp.sum(factors.within * blocked[..., None, :, :], axis=-2)
  if factors.to_block is not None:
    earlier = factors.to_block * writes[..., None, :, :]
    earlier = jnp.sum(earlier, axis=-2, keepdims=True)
    total = total + factors.from_block * earlier
  return total.reshape(writes.shape)


def scores(
  factors: ChannelDecay, query: jax.Array, writes: jax.Array, dtype
) -> jax.Array:
  """Returns the scores A defined above, zero above the diagonal.

  Args:
    factors: shares of the tile.
    query: q, `[batch, heads, time, channels]`.
    writes: a, `[batch, heads, time, channels]`.
    dtype: dtype of the operands of matrix products.

  Returns:
    `[batch, heads, time, time]`, float32 or wider.
  """
  near, far = _scores(factors, query, writes, dtype)
  *rows, blocks, block, _ = near.shape
  own = jnp.eye(blocks, dtype=near.dtype)[:, None, :, None]
  found = (near[..., None, :] * own).reshape(*rows, blocks, block, -1)
  if far is not None:
    found = found + far
  return found.reshape(*rows, blocks * block, -1)


def read(
  factors: ChannelDecay,
  query: jax.Array,
  writes: jax.Array,
  values: jax.Array,
  dtype,
) -> jax.Array:
  """Returns sum_{i <= r} A_{r,i} values_i, with the scores A defined above.

  Args:
    factors: shares of the tile.
    query: q, `[batch, heads, time, channels]`.
    writes: a, `[batch, heads, time, channels]`.
    values: `[batch, heads, time, value]`.
    dtype: dtype of the operands of matrix products.

  Returns:
    `[batch, heads, time, value]`, float32 or wider.
  """
  near, far = _scores(factors, query, writes, dtype)
  blocked = into_blocks(values, near.shape[-1])
  output = contract.product("bhnri,bhnid->bhnrd", near, blocked, dtype)
  if far is not None:
    output = output + contract.product("bhnri,bhid->bhnrd", far, values, dtype)
  return output.reshape(values.shape)


def read_into(
  factors: ChannelDecay, matches: jax.Array, writes: jax.Array, dtype
) -> jax.Array:
  """Returns sum_{i <= r} matches_{r,i} writes_i exp(G_r - G_i), per channel.

  This is what a query reads when the decaying channels are the content that is
  read. In `scores` they are the address.

  Args:
    factors: shares of the tile.
    matches: `[batch, heads, time, time]`; entries above the diagonal are not
      read.
    writes: `[batch, heads, time, channels]`.
    dtype: dtype of the operands of matrix products.

  Returns:
    `[batch, heads, time, channels]`, float32 or wider.
  """
  block = factors.within.shape[-2]
  rows = into_blocks(matches, block)
  *_, blocks, _, time = rows.shape
  own = rows.reshape(*rows.shape[:-1], blocks, block)
  own = jnp.einsum("bhnrni->bhnri", own)
  pairs = factors.within * into_blocks(writes, block)[..., None, :, :]
  found = jnp.sum(own[..., None] * pairs, axis=-2)
  if factors.to_block is not None:
    earlier = factors.to_block * writes[..., None, :, :]
    earlier = contract.product("bhnri,bhnim->bhnrm", rows, earlier, dtype)
    found = found + factors.from_block * earlier
  return found.reshape(*found.shape[:-3], time, -1)


def _scores(factors, query, writes, dtype):
  """Returns A within blocks `[..., n, block, block]`, and to earlier blocks."""
  block = factors.within.shape[-2]
  queries = into_blocks(query, block)
  pairs = factors.within * into_blocks(writes, block)[..., None, :, :]
  near = jnp.sum(queries[..., :, None, :] * pairs, axis=-1)
  if factors.to_block is None:
    return near, None
  far = contract.product(
    "bhnrm,bhnim->bhnri",
    queries * factors.from_block,
    factors.to_block * writes[..., None, :, :],
    dtype,
  )
  return near, far
