"""One tile of softmax attention on matrix units, and what its queries see.

Tokens carry the run they belong to (a segment within a row) and their position
in it; nothing else decides what is seen, wherever a token lies.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.softmax_attention import types


class Tokens(NamedTuple):
  """Keys and values, and what they are of.

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
  position: jax.Array, other: jax.Array, *, spec: types.Spec, ring: int
) -> jax.Array:
  """Whether tokens at `position` see tokens of their run at `other`.

  Args:
    position: integers of any shape.
    other: integers that broadcast with them.
    spec: the attention's meaning.
    ring: rows of the window that are overwritten in turn.

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
  spec: types.Spec,
  sink_query: jax.Array | None = None,
) -> jax.Array:
  """Returns `[batch, queries, heads, value]`, float32 or wider.

  Args:
    query: `[batch, queries, heads, key]`.
    tokens: all that may be seen.
    seen: bool `[batch, queries, tokens]`; each query sees something.
    spec: the attention's meaning.
    sink_query: as `query`, for sinks; None for `query`.
  """
  dtype = query.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  # bfloat16 operands are one pass of a matrix unit. float32 ones would be
  # rounded to bfloat16 by default on a TPU: whoever hands in float32 wants it.
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

  scale = query.shape[-1] ** -0.5 if spec.scale is None else spec.scale

  def products(query):
    # Heads that share keys and values are a group: no key is repeated.
    groups = query.reshape(
      *query.shape[:2], tokens.key.shape[2], -1, query.shape[-1]
    )
    return scale * product("bqhgd,bkhd->bhgqk", groups, tokens.key)

  scores = products(query)
  if sink_query is not None:
    sinks = (tokens.position < spec.sink_tokens)[:, None, None, None]
    scores = jnp.where(sinks, products(sink_query), scores)
  scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
  # Normalised last: the sum is over what was multiplied, and fewer numbers are
  # divided.
  weights = jnp.exp(
    scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  )
  total = jnp.sum(weights, axis=-1)
  outputs = product("bhgqk,bkhd->bqhgd", weights, tokens.value)
  outputs /= jnp.moveaxis(total, 3, 1)[..., None]
  return outputs.reshape(*query.shape[:3], -1)
