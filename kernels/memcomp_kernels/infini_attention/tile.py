"""One tile of Infini-attention's memory on matrix units: no layout.

Rows are tokens, Q and K their features, M', z' what they read from before the
tile, U what they write. In segments all rows read M', z':

  E = V - diag(K z' + eps)^-1 K M',       Y = diag(Q z' + eps)^-1 Q M'

Per token a row also meets what those above it wrote. With S = strict(K K^T),
R = strict(Q K^T) and 1 a column of ones,

  d = K z' + S 1 + eps,    (I + diag(d)^-1 S) E = V - diag(d)^-1 K M'
  Y = diag(Q z' + R 1 + eps)^-1 (Q M' + R U)

which is a delta rule's triangular system whose divisors are known. U is E, or V
with the linear rule; M <- M + K^T U, z <- z + K^T 1. A tile's empty places hold
zeros and write nothing.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.infini_attention import reference
from memcomp_kernels.math import delta, matmul


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
    complete: not read.
    spec: the memory's options.
    tiling: None: all of the tiling is the tile's size.

  Returns:
    M and z after the tile, reads `[batch, heads, tile, value]` of their dtype,
    and None.
  """
  del complete, tiling
  query, key, value = inputs
  dtype, time = query.dtype, query.shape[2]
  memory, normalizer = memories
  start = jnp.concatenate([starts[0], starts[1][..., None]], axis=-1)
  value = value.astype(memory.dtype)

  def met(x):
    """What rows x meet: sums with eps, M', and shares of rows above."""
    old = matmul.product("bhtk,bhkv->bhtv", x, start, dtype)
    old, sums = old[..., :-1], old[..., -1:] + spec.eps
    if spec.stale:
      return old, sums, None
    shares = matmul.product("bhtk,bhik->bhti", x, key, dtype)
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
    read += matmul.product("bhti,bhiv->bhtv", shares, written, dtype)
  memory += matmul.product("bhik,bhiv->bhkv", key, written, dtype)
  normalizer += jnp.sum(key.astype(normalizer.dtype), axis=2)
  return (memory, normalizer), read / sums, None
