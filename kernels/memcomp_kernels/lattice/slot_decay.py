"""Decay of every slot at its own pace, along a chunk, without any overflow.

With L = log(beta mu) <= 0 per token and slot, and G its running sum, the share
of write i at token r is exp(G_r - G_i), one number per slot: scores

  A_{r,i} = sum_m q_{r,m} a_{i,m} exp(G_{r,m} - G_{i,m}),   i <= r

are no matrix product as they stand, and the usual split exp(G_r) exp(-G_i)
overflows on long chunks. A chunk is cut into blocks. Within one, shares are
taken in pairs. Between two, with g the sum before the reading block,

  exp(G_r - G_i) = exp(G_r - g) exp(g - G_i),   both exponents <= 0,

each block scales the earlier tokens for itself. All masks precede the exp.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels.primitives import matmul


class SlotDecay(NamedTuple):
  """Shares along a chunk of `time` tokens in blocks of `block`.

  Attributes:
    from_start: exp(G_r), `[..., time, slots]`.
    to_end: exp(G_C - G_i), `[..., time, slots]`.
    total: exp(G_C), `[..., slots]`.
    within: exp(G_r - G_i), `[..., blocks, block, block, slots]`, zero for
      i > r.
    from_block: exp(G_r - g), `[..., blocks, block, slots]`.
    to_block: exp(g - G_i), `[..., blocks, time, slots]`, zero for i not before
      the block; None where there is one block.
  """

  from_start: jax.Array
  to_end: jax.Array
  total: jax.Array
  within: jax.Array
  from_block: jax.Array
  to_block: jax.Array | None


def slot_decay(log_decay: jax.Array, block: int) -> SlotDecay:
  """Returns the shares; `log_decay` is L, `[..., time, slots]`, <= 0.

  `block` must divide the time.
  """
  time = log_decay.shape[-2]
  cumulative = jnp.cumsum(log_decay, axis=-2)
  blocked = into_blocks(cumulative, block)
  before = into_blocks(cumulative - log_decay, block)[..., :1, :]
  causal = jnp.tril(jnp.ones((block, block), bool))[..., None]
  difference = blocked[..., :, None, :] - blocked[..., None, :, :]
  to_block = None
  if time > block:
    first = jnp.arange(0, time, block)[:, None, None]
    earlier = jnp.arange(time)[:, None] < first
    to_block = _masked_exp(earlier, before - cumulative[..., None, :, :])
  last = cumulative[..., -1:, :]
  return SlotDecay(
    from_start=jnp.exp(cumulative),
    to_end=jnp.exp(last - cumulative),
    total=jnp.exp(last[..., 0, :]),
    within=_masked_exp(causal, difference),
    from_block=jnp.exp(blocked - before),
    to_block=to_block,
  )


def into_blocks(x: jax.Array, block: int) -> jax.Array:
  """`[..., time, dim]` to `[..., blocks, block, dim]`."""
  return x.reshape(*x.shape[:-2], -1, block, x.shape[-1])


def running_sum(factors: SlotDecay, writes: jax.Array) -> jax.Array:
  """sum_{i <= r} exp(G_r - G_i) writes_i, slot by slot.

  Args:
    factors: of the chunk.
    writes: `[..., time, slots]`.
  """
  block = factors.within.shape[-2]
  blocked = into_blocks(writes, block)
  total = jnp.sum(factors.within * blocked[..., None, :, :], axis=-2)
  if factors.to_block is not None:
    earlier = factors.to_block * writes[..., None, :, :]
    earlier = jnp.sum(earlier, axis=-2, keepdims=True)
    total = total + factors.from_block * earlier
  return total.reshape(writes.shape)


def read(
  factors: SlotDecay,
  query: jax.Array,
  writes: jax.Array,
  values: jax.Array,
  dtype,
) -> jax.Array:
  """sum_{i <= r} A_{r,i} values_i, with the scores A above.

  Args:
    factors: of the chunk.
    query: q, `[batch, heads, time, slots]`.
    writes: a, `[batch, heads, time, slots]`.
    values: `[batch, heads, time, value]`.
    dtype: of the operands of matrix products.

  Returns:
    `[batch, heads, time, value]`, float32 or wider.
  """
  block = factors.within.shape[-2]
  queries = into_blocks(query, block)
  pairs = factors.within * into_blocks(writes, block)[..., None, :, :]
  scores = jnp.sum(queries[..., :, None, :] * pairs, axis=-1)
  output = matmul.product(
    "bhnri,bhnid->bhnrd", scores, into_blocks(values, block), dtype
  )
  if factors.to_block is not None:
    scores = matmul.product(
      "bhnrm,bhnim->bhnri",
      queries * factors.from_block,
      factors.to_block * writes[..., None, :, :],
      dtype,
    )
    output = output + matmul.product("bhnri,bhid->bhnrd", scores, values, dtype)
  return output.reshape(values.shape)


def _masked_exp(mask: jax.Array, exponent: jax.Array) -> jax.Array:
  return jnp.where(mask, jnp.exp(jnp.where(mask, exponent, 0.0)), 0.0)
