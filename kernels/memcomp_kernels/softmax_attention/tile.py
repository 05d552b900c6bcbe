"""One tile of softmax attention as matrix products, and what its queries see.

Tokens carry the run that they belong to (a segment within a row) and their
position in it. These alone determine what is seen, wherever a token lies.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.softmax_attention import reference


class Tokens(NamedTuple):
  """Keys and values, with their runs and positions.

  Attributes:
    key: `[batch, tokens, kv_heads, key]`.
    value: `[batch, tokens, kv_heads, value]`.
    run: int32 `[batch, tokens]`.
    position: int32 `[batch, tokens]`.
  """

  key: jax.Array
  value: jax.Array
  run: jax.Array
  position: jax.Array


def sees(
  position: jax.Array, other: jax.Array, *, spec: reference.Spec, ring: int
) -> jax.Array:
  """Whether tokens at `position` see tokens of their run at `other`.

  Args:
    position: integers of any shape.
    other: integers that broadcast with them.
    spec: the attention's options.
    ring: number of rows of the window that are overwritten in turn.

  Returns:
    bool, of their common shape.
  """
  seen = (position - other < ring) | (other < spec.sink_tokens)
  if spec.chunk_size is not None and spec.window_size is not None:
    end_of_chunk = (position // spec.chunk_size + 1) * spec.chunk_size
    seen &= other >= end_of_chunk - spec.window_size
  return seen & (other <= position)


def attend(
  query: jax.Array,
  tokens: Tokens,
  seen: jax.Array,
  *,
  spec: reference.Spec,
  sink_query: jax.Array | None = None,
) -> jax.Array:
  """Returns `[batch, queries, kv_heads, value]`, float32 or wider.

  Args:
    query: `[batch, queries, kv_heads, key]`, see `by_group`.
    tokens: all tokens that may be seen.
    seen: bool `[batch, queries, tokens]`. A query that sees nothing gets zeros.
    spec: the attention's options.
    sink_query: query for sinks, of the same shape; None for `query`.
  """
  dtype = query.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  # bfloat16 operands take one pass of a matrix unit. A TPU would by default
  # round float32 operands to bfloat16, so they ask for the highest precision.
  precision = (
    lax.Precision.DEFAULT if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
  )

  def product(equation, a, b):
    return jnp.einsum(
      equation,
      a.astype(dtype),
      b.astype(dtype),
      precision=precision,
      preferred_element_type=wide,
    )

  scale = contract.read_scale(spec, query.shape[-1])
  scores = scale * product("bqhd,bkhd->bhqk", query, tokens.key)
  if sink_query is not None:
    of_sinks = scale * product("bqhd,bkhd->bhqk", sink_query, tokens.key)
    sinks = (tokens.position < spec.sink_tokens)[:, None, None]
    scores = jnp.where(sinks, of_sinks, scores)
  scores = jnp.where(seen[:, None], scores, -jnp.inf)
  # Places that only fill up a tile see nothing. nan there would reach the
  # adjoints of all values, because zero times nan is nan.
  top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
  # The division comes last: the sum is then over the weights that were
  # multiplied, and fewer numbers are divided.
  total = jnp.sum(weights, axis=-1)
  total = jnp.where(total == 0.0, 1.0, total)
  outputs = product("bhqk,bkhd->bqhd", weights, tokens.value)
  return outputs / jnp.swapaxes(total, 1, 2)[..., None]


def by_group(query: jax.Array, kv_heads: int) -> jax.Array:
  """Turns heads that share keys and values into more queries of one head.

  `[batch, queries, heads, dim]` becomes `[batch, queries * groups, kv_heads,
  dim]`, so that no key is repeated.
  """
  batch, queries, heads, dim = query.shape
  if heads == kv_heads:
    return query
  query = query.reshape(batch, queries, kv_heads, -1, dim)
  return jnp.swapaxes(query, 2, 3).reshape(batch, -1, kv_heads, dim)


def by_head(outputs: jax.Array, queries: int) -> jax.Array:
  """Undoes `by_group`: `[batch, queries, heads, dim]`."""
  batch, rows, kv_heads, dim = outputs.shape
  if rows == queries:
    return outputs
  outputs = outputs.reshape(batch, queries, -1, kv_heads, dim)
  return jnp.swapaxes(outputs, 2, 3).reshape(batch, queries, -1, dim)
