"""One tile of a memory that sums decayed outer products.

  A_t = a_t A_{t-1} + k_t (x) u_t,      y_t = q_t A_t

Rows are tokens. With mu and Omega of `primitives.decay`, and A before the tile,

  Y = diag(mu) Q A + (Omega * (Q K^T)) U
  A <- mu_C A + K^T diag(Omega_C) U

Linear attention and state space models write what they are given; the delta
rule first solves for U (`primitives.delta`). Queries and keys may have fewer
heads than values: each is then shared by as many heads that follow each other.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.primitives import decay, matmul


def read(
  memory: jax.Array,
  query: jax.Array,
  key: jax.Array,
  written: jax.Array,
  factors: decay.Decay,
) -> jax.Array:
  """Returns y `[batch, heads, tile, value]` in the memory's dtype.

  Args:
    memory: A before the tile, `[batch, heads, key, value]`.
    query: `[batch, groups, tile, key]`, of the dtype of products; heads are a
      multiple of groups.
    key: `[batch, groups, tile, key]`.
    written: U, `[batch, heads, tile, value]`.
    factors: `[batch, heads, tile]`.
  """
  dtype, groups = query.dtype, query.shape[1]
  scores = matmul.product("bgtk,bgik->bgti", query, key, dtype)
  share = split_heads(factors.between, groups) * scores[:, :, None]
  y = matmul.product(
    "bgnti,bgniv->bgntv", share, split_heads(written, groups), dtype
  )
  carried = matmul.product(
    "bgtk,bgnkv->bgntv", query, split_heads(memory, groups), dtype
  )
  mu = split_heads(factors.from_start, groups)
  return join_heads(y + mu[..., None] * carried)


def write(
  memory: jax.Array,
  key: jax.Array,
  written: jax.Array,
  factors: decay.Decay,
  dtype: jnp.dtype,
) -> jax.Array:
  """Returns the memory after the tile; arguments as of `read`.

  Args:
    memory: A before the tile.
    key: of the tokens.
    written: U.
    factors: of the tile.
    dtype: of products.
  """
  kept = split_heads(factors.to_end[..., None] * written, key.shape[1])
  new = matmul.product("bgik,bgniv->bgnkv", key, kept, dtype)
  return factors.total[..., None, None] * memory + join_heads(new)


def split_heads(x: jax.Array, groups: int) -> jax.Array:
  """`[batch, heads, ...]` to `[batch, groups, heads / groups, ...]`."""
  return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def join_heads(x: jax.Array) -> jax.Array:
  """`[batch, groups, heads / groups, ...]` to `[batch, heads, ...]`."""
  return x.reshape(x.shape[0], -1, *x.shape[3:])
