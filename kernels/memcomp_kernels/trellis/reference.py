"""Trellis token by token, as the paper writes it (arXiv 2512.23852).

Symbols: M_K, M_V memories; k, v, q, alpha inputs; beta = exp(log_decay);
gamma = write_rate; C = chunk_size; M' the memory at the start of the current
chunk (M' = M_{t-1} when gradients are taken per token).

  loss       l(M; w, alpha) = |phi(M w) - alpha|^2 / 2              eq. (5)-(7)
  gradient   u_t = J_phi(z_t)^T (phi(z_t) - alpha_t), z_t = M' w_t
  update     M_t = beta_t M_{t-1} - gamma_t u_t w_t^T               eq. (8)
  pass 1     w = k on M_K, read  f_t = f(M_{K,t} q_t)
  pass 2     w = v on M_V, read  y_t = M_{V,t}^T f_t                eq. (9)

Both reads come after the write. The paper prints J_phi without the transpose
and drops the loss's factor 2 between (8) and (9); the README here lists all
corrections.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.math import activations
from memcomp_kernels.trellis import types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _gates(inputs: types.Inputs, spec: types.Spec, dtype) -> tuple:
  """Returns (beta_K, beta_V), (gamma_K, gamma_V), each `[batch, heads]`."""
  log_decay = inputs.log_decay.astype(dtype)
  if not spec.forget_gate:
    log_decay = jnp.zeros_like(log_decay)
  beta, gamma = jnp.exp(log_decay), inputs.write_rate.astype(dtype)
  return (beta[..., 0], beta[..., -1]), (gamma[..., 0], gamma[..., -1])


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
  dtype = state.key_memory.dtype
  q, k, v, alpha, log_eps = jax.tree.map(
    lambda x: x.astype(dtype),
    (inputs.query, inputs.key, inputs.value, inputs.target, inputs.log_phi_eps),
  )
  beta, gamma = _gates(inputs, spec, dtype)
  eps = spec.eps(log_eps)

  def write(M, M_start, w, beta, gamma):
    z = _einsum("bhmd,bhd->bhm", M_start, w)
    if spec.first_order:
      z = lax.stop_gradient(z)
    u = activations.write_direction(spec.phi, z, alpha, eps)
    M = beta[..., None, None] * M
    return M - gamma[..., None, None] * u[..., :, None] * w[..., None, :]

  M_K, M_V = state.key_memory, state.value_memory
  start_K, start_V = M_K, M_V
  if state.position is not None:  # stale gradients
    start_K, start_V = contract.batched_where(
      state.position == 0,
      (M_K, M_V),
      (state.key_memory_start, state.value_memory_start),
    )
  M_K = write(M_K, start_K, k, beta[0], gamma[0])
  M_V = write(M_V, start_V, v, beta[1], gamma[1])

  f = activations.activate(
    spec.read_activation, _einsum("bhmd,bhd->bhm", M_K, q), spec.read_eps
  )
  y = _einsum("bhmd,bhm->bhd", M_V, f)
  if spec.value_readout_phi:
    y = activations.activate(spec.phi, y, eps)

  state = state._replace(
    key_memory=M_K,
    value_memory=M_V,
    segment_id=contract.next_segment_id(state.segment_id),
  )
  if state.position is not None:
    position = (state.position + 1) % spec.chunk_size
    start_K, start_V = contract.batched_where(
      position == 0, (M_K, M_V), (start_K, start_V)
    )
    state = state._replace(
      key_memory_start=start_K, value_memory_start=start_V, position=position
    )
  return state, y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
