"""The delta rule token by token, as its papers write it.

Symbols: S the memory, rows by key; q, k, v query, key and value; alpha =
exp(log_decay); beta = write_rate.

  S_t = alpha_t S_{t-1}
        + beta_t k_t (v_t - (alpha_t S_{t-1})^T k_t)^T   2412.06464, section 3.1
  o_t = scale S_t^T q_t

The papers write S transposed, and the update as alpha_t S_{t-1} (I - beta_t k_t
k_t^T) + beta_t v_t k_t^T: the same. alpha_t = 1 is DeltaNet (2406.06484). The
error is taken after the decay, the output read after the write.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.delta_rule import types

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
    The state after the token, and o `[batch, heads, value]` in query's dtype.
  """
  S = state.memory
  q, k, v, log_alpha, beta = (x.astype(S.dtype) for x in inputs)
  if spec.forget_gate:
    S = jnp.exp(log_alpha)[..., None] * S
  error = v - _einsum("bhkv,bhk->bhv", S, k)
  S = S + _einsum("bhk,bhv->bhkv", k, beta * error)
  o = spec.read_scale(k.shape[-1]) * _einsum("bhkv,bhk->bhv", S, q)
  segment_id = contract.next_segment_id(state.segment_id)
  return types.State(S, segment_id), o.astype(inputs.query.dtype)


reference = contract.token_scan(step)
