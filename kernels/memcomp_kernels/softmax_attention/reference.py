"""Softmax attention token by token.

  y_t = sum_j p_{t,j} v_j,   p_t = softmax over j of scale <q_t, k_j>

over the tokens j that t sees, t itself included: the first `sink_tokens` of
its segment and the last window_size - sink_tokens, less what a window moved by
chunks has let go. They are what `window` holds. Heads of queries
share keys and values by groups (arXiv 2305.13245): head h reads those of head
h // (heads / kv_heads).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, window
from memcomp_kernels.softmax_attention import types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Writes one token, then reads.

  Args:
    state: the window before the token.
    inputs: `[batch, heads, dim]` arrays, of key and value `[batch, kv_heads,
      dim]`.
    spec: the attention's meaning.

  Returns:
    The state after the token, and y `[batch, heads, value]` in query's dtype.
  """
  dtype = state.keys.dtype
  q, k, v = (x.astype(dtype) for x in inputs[:3])
  t = state.position
  (K, V), _, _ = window.push(
    (state.keys, state.values), (k, v), t, sink_tokens=spec.sink_tokens
  )
  j = window.held(t + 1, size=K.shape[2], sink_tokens=spec.sink_tokens)
  seen = j >= 0
  if spec.chunk_size is not None and spec.window_size is not None:
    end_of_chunk = (t // spec.chunk_size + 1) * spec.chunk_size
    seen &= j >= end_of_chunk[:, None] - spec.window_size
  scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale

  def products(q, K):
    groups = q.reshape(q.shape[0], K.shape[1], -1, q.shape[-1])
    return scale * _einsum("bhgd,bhjd->bhgj", groups, K)

  scores = products(q, K)
  if inputs.sink_query is not None:
    sinks, ring = jnp.split(K, [spec.sink_tokens], axis=2)
    scores = jnp.concatenate(
      [products(inputs.sink_query.astype(dtype), sinks), products(q, ring)],
      axis=-1,
    )
  p = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
  y = _einsum("bhgj,bhjd->bhgd", p, V).reshape(*q.shape[:2], -1)
  state = types.State(
    keys=K,
    values=V,
    position=t + 1,
    segment_id=contract.next_segment_id(state.segment_id),
  )
  return state, y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
