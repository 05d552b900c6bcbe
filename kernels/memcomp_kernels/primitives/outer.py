"""One tile of a memory that sums decayed outer products.

  A_t = a_t A_{t-1} + k_t (x) u_t,      y_t = q_t A_t

Rows are tokens. With mu and Omega of `primitives.decay`, and A before the tile,

  Y = diag(mu) Q A + (Omega * (Q K^T)) U
  A <- mu_C A + K^T diag(Omega_C) U

All but A is known before the tiles are run, for all of them at once. Queries
and keys may have fewer heads than values: each is then shared by as many heads
that follow each other.
"""

from typing import NamedTuple

import jax

from memcomp_kernels.primitives import decay, matmul


class Prepared(NamedTuple):
  """What a tile needs beside A.

  Attributes:
    query: Q, `[batch, groups, tile, key]`; heads are a multiple of groups.
    key: K, likewise.
    kept: diag(Omega_C) U, `[batch, heads, tile, value]`, float32 or wider.
    output: (Omega * (Q K^T)) U, likewise.
    from_start: mu, `[batch, heads, tile]`.
    total: mu_C, `[batch, heads]`.
  """

  query: jax.Array
  key: jax.Array
  kept: jax.Array
  output: jax.Array
  from_start: jax.Array
  total: jax.Array


def prepare(
  query: jax.Array,
  key: jax.Array,
  written: jax.Array,
  factors: decay.Decay,
) -> Prepared:
  """Does what needs no memory.

  Args:
    query: `[batch, groups, tile, key]`, of the dtype of products.
    key: `[batch, groups, tile, key]`.
    written: U, `[batch, heads, tile, value]`, float32 or wider.
    factors: `[batch, heads, tile]`.
  """
  dtype, groups = query.dtype, query.shape[1]
  scores = matmul.product("bgtk,bgik->bgti", query, key, dtype)
  share = split_heads(factors.between, groups) * scores[:, :, None]
  output = matmul.product(
    "bgnti,bgniv->bgntv", share, split_heads(written, groups), dtype
  )
  return Prepared(
    query=query,
    key=key,
    kept=factors.to_end[..., None] * written,
    output=join_heads(output),
    from_start=factors.from_start,
    total=factors.total,
  )


def run(memory: jax.Array, prepared: Prepared) -> tuple[jax.Array, jax.Array]:
  """Returns A after the tile, and y `[batch, heads, tile, value]`.

  Args:
    memory: A before the tile, `[batch, heads, key, value]`.
    prepared: all else.
  """
  dtype, groups = prepared.query.dtype, prepared.query.shape[1]
  carried = matmul.product(
    "bgtk,bgnkv->bgntv", prepared.query, split_heads(memory, groups), dtype
  )
  output = prepared.from_start[..., None] * join_heads(carried)
  written = matmul.product(
    "bgik,bgniv->bgnkv", prepared.key, split_heads(prepared.kept, groups), dtype
  )
  memory = prepared.total[..., None, None] * memory + join_heads(written)
  return memory, prepared.output + output


def split_heads(x: jax.Array, groups: int) -> jax.Array:
  """`[batch, heads, ...]` to `[batch, groups, heads / groups, ...]`."""
  return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def join_heads(x: jax.Array) -> jax.Array:
  """`[batch, groups, heads / groups, ...]` to `[batch, heads, ...]`."""
  return x.reshape(x.shape[0], -1, *x.shape[3:])
