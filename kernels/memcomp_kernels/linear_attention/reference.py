"""Linear attention token by token, as the paper writes it (2006.16236).

Symbols: phi the feature map; S the memory, z the sum of features; alpha =
exp(log_decay), 1 without a forget gate.

  S_t = alpha_t S_{t-1} + phi(k_t) v_t^T                      eq. (18)
  z_t = alpha_t z_{t-1} + phi(k_t)                            eq. (19)
  y_t = S_t^T scale phi(q_t) / (z_t . scale phi(q_t) + eps)   eq. (20)

Without `normalize` there is no z and no division. The paper has no decay; one
for each token and head is RetNet's (2307.08621) where it is constant.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.linear_attention import types
from memcomp_kernels.math import feature_maps

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
    The state after the token, and y `[batch, heads, value]` in query's dtype.
  """
  S, z, _ = state
  phi = feature_maps.FEATURE_MAPS[spec.feature_map]
  q, k, v = (x.astype(S.dtype) for x in inputs[:3])
  q, k = spec.read_scale(k.shape[-1]) * phi(q), phi(k)
  alpha = jnp.ones((), S.dtype)
  if inputs.log_decay is not None:
    alpha = jnp.exp(inputs.log_decay.astype(S.dtype))
  S = alpha[..., None] * S + _einsum("bhk,bhv->bhkv", k, v)
  y = _einsum("bhkv,bhk->bhv", S, q)
  if z is not None:
    z = alpha * z + k
    y = y / (_einsum("bhk,bhk->bh", z, q)[..., None] + spec.eps)
  segment_id = contract.next_segment_id(state.segment_id)
  return types.State(S, z, segment_id), y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
