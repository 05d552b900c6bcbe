"""The algebra of one tile of Infini-attention's memory, as matrix products.

Rows are tokens, Q and K are their features, M' and z' what they read from
before the tile, and U what they write. In segments all rows read M' and z':

  E = V - diag(K z' + eps)^-1 K M',       Y = diag(Q z' + eps)^-1 Q M'

In the form per token a row also reads what the rows above it wrote. With S =
strict(K K^T), R = strict(Q K^T) and 1 a column of ones,

  d = K z' + S 1 + eps,    (I + diag(d)^-1 S) E = V - diag(d)^-1 K M'
  Y = diag(Q z' + R 1 + eps)^-1 (Q M' + R U)

This is a delta rule's triangular system with known divisors. U is E, or V with
the linear rule. Then M <- M + K^T U, z <- z + K^T 1. A tile's empty places hold
zeros and write nothing.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.infini_attention import reference
from memcomp_kernels.math import delta


def run(
  memories: form_lib.Memories,
  starts: form_lib.Memories,
  inputs: tuple[jax.Array, jax.Array, jax.Array],
  complete: jax.Array,
  spec: reference.Spec,
  tiling: None,
) -> tuple[form_lib.Memories, jax.Array, None]:
  """Reads and writes one tile.

  Args:
    memories: M `[batch, heads, key, value]` and z `[batch, heads, key]` before
      the tile.
    starts: M' and z'.
    inputs: features of queries and of keys, and values, `[batch, heads, tile,
      dim]`.
    complete: unused.
    spec: the memory's options.
    tiling: None, because the tile's size is the only option.

  Returns:
    M and z after the tile; reads `[batch, heads, tile, value]` in their dtype;
    and None.
  """
  del complete, tiling
  query, key, value = inputs
  dtype, time = query.dtype, query.shape[2]
  memory, normalizer = memories
  start = jnp.concatenate([starts[0], starts[1][..., None]], axis=-1)
  value = value.astype(memory.dtype)

  def met(x):
    """Returns reads of M', sums with eps, and shares of the rows above."""
    old = contract.product("bhtk,bhkv->bhtv", x, start, dtype)
    old, sums = old[..., :-1], old[..., -1:] + spec.eps
    if spec.stale:
      return old, sums, None
    shares = contract.product("bhtk,bhik->bhti", x, key, dtype)
    shares = jnp.where(jnp.tril(jnp.ones((time, time), bool), -1), shares, 0)
    return old, sums + jnp.sum(shares, axis=-1, keepdims=True), shares

  written = value
  if spec.rule == "delta":
    old, sums, shares = met(key)
    written = value - old / sums
    if shares is not None:
      written = delta.solve(shares / sums, written)
  read, sums, shares = met(query)
  if shares is not None:
    read += contract.product("bhti,bhiv->bhtv", shares, written, dtype)
  memory += contract.product("bhik,bhiv->bhkv", key, written, dtype)
  normalizer += jnp.sum(key.astype(normalizer.dtype), axis=2)
  return (memory, normalizer), read / sums, None
