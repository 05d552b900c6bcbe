"""RWKV-7's time mixing token by token (arXiv 2503.14456, section 4.1).

Symbols: S the memory, rows by key, the transpose of the paper's wkv; r, k~, v,
kappa^ query, key, value and removal key; w = exp(log_decay), a = write_rate.

  wkv_t = wkv_{t-1} (diag(w_t) - kappa^_t^T (a_t * kappa^_t)) + v_t^T k~_t
                                                              eq. (17)
  S_t = diag(w_t) S_{t-1} - (a_t * kappa^_t) (S_{t-1}^T kappa^_t)^T + k~_t v_t^T
  p_t = scale S_t^T r_t                                       eq. (18)

What is removed is asked of the memory before the decay; p is read after the
write. The bonus of eq. (20) adds to p outside of the memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.rwkv7 import types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Writes one token, then reads.

  Args:
    state: the memory before the token.
    inputs: `[batch, heads, dim]` arrays.
    spec: the memory's meaning.

  Returns:
    The state after the token, and p `[batch, heads, value]` in query's dtype.
  """
  S = state.memory
  r, k, v, kappa, log_w, a = (x.astype(S.dtype) for x in inputs)
  removed = _einsum("bhkv,bhk->bhv", S, kappa)
  S = jnp.exp(log_w)[..., None] * S
  S = S - _einsum("bhk,bhv->bhkv", a * kappa, removed)
  S = S + _einsum("bhk,bhv->bhkv", k, v)
  p = spec.read_scale(k.shape[-1]) * _einsum("bhkv,bhk->bhv", S, r)
  segment_id = contract.next_segment_id(state.segment_id)
  return types.State(S, segment_id), p.astype(inputs.query.dtype)


reference = contract.token_scan(step)
