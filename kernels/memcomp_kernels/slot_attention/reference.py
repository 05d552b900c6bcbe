"""Slot attention token by token.

Symbols: k, v, q a token's key, value and query; alpha = exp(log_decay) and s =
write_logit, a number for each slot i.

  write  K~_i <- a_i K~_i + w_i k,   V~_i <- a_i V~_i + w_i v
  read   y = sum_i p_i V~_i,         p = softmax(scale K~ q)

Gated Slot Attention (arXiv 2409.07146, eq. (6)-(7)):

  a = alpha,              w = 1 - alpha

Attention with bounded-memory control (ABC, arXiv 2110.02488, eq. (4)-(6), its
learned control exp(s) normalised over the tokens so far):

  z' = log(exp(z) + exp(s)),   a = exp(z - z'),   w = exp(s - z')

The token is read after it is written.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.slot_attention import types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Writes one token, then reads.

  Args:
    state: the memory before the token.
    inputs: `[batch, heads, ...]` arrays.
    spec: the memory's meaning.

  Returns:
    The state after the token, and y `[batch, heads, value]` in query's dtype.
  """
  dtype = state.key_memory.dtype
  q, k, v, log_alpha, s = jax.tree.map(
    lambda x: None if x is None else x.astype(dtype),
    tuple(inputs),
    is_leaf=lambda x: x is None,
  )
  z = state.log_total
  if z is None:  # "gated"
    a = jnp.exp(log_alpha)
    w = -jnp.expm1(log_alpha)  # 1 - a, which cancels where little is forgotten
  else:
    before, z = z, jnp.logaddexp(z, s)
    a = jnp.exp(before - z)
    w = jnp.exp(s - z)
  K = a[..., None] * state.key_memory + w[..., None] * k[..., None, :]
  V = a[..., None] * state.value_memory + w[..., None] * v[..., None, :]
  scale = spec.score_scale(q.shape[-1])
  p = jax.nn.softmax(scale * _einsum("bhmk,bhk->bhm", K, q), axis=-1)
  y = _einsum("bhm,bhmv->bhv", p, V)
  segment_id = contract.next_segment_id(state.segment_id)
  return types.State(K, V, z, segment_id), y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
