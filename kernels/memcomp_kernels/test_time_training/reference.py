"""Test-time training token by token, as the paper writes it (2407.04620).

Symbols: W the inner model's weights, biases included; k, v, q the training,
label and test view of a token; eta = write_rate; beta = exp(log_decay); c =
step_scale; W' the weights at the start of the current chunk (W' = W_{t-1} when
gradients are taken per token).

  model   f(x; W) = x + LN(model(x; W))               section 2.7
  loss    l(W; t) = |f(k_t; W) - v_t|^2 / 2           eq. (4)
  update  A_t = beta_t A_{t-1} - eta_t grad l(W'; t)  eq. (6), A = W' at first
          W_t = W' + c_t (A_t - W')                   released code
  output  y_t = f(q_t; W_t)                           eq. (5)

The output is read after the write. The chunk's last W_t is the next chunk's W'.
Without forget gate and with c = 1, A_t = W_t is the paper's mini-batch step.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.math import activations
from memcomp_kernels.test_time_training import types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def answer(
  layers: types.Layers,
  x: jax.Array,
  norm_scale: jax.Array,
  norm_bias: jax.Array,
  eps: float,
) -> jax.Array:
  """f(x; W), `[batch, heads, dim]`."""
  z = x
  for i, (weight, bias) in enumerate(layers):
    z = jax.nn.gelu(z) if i else z
    z = _einsum("bhi,bhio->bho", z, weight) + bias
  return x + norm_scale * activations.layer_norm(z, eps) + norm_bias


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Writes one token, then reads.

  Args:
    state: the memory before the token.
    inputs: `[batch, heads, dim]` arrays.
    spec: the memory's meaning.

  Returns:
    The state after the token, and y `[batch, heads, dim]` in query's dtype.
  """
  dtype = state.norm_scale.dtype
  q, k, v, log_beta, eta, c = jax.tree.map(lambda x: x.astype(dtype), inputs)

  def f(W, x):
    return answer(W, x, state.norm_scale, state.norm_bias, spec.norm_eps)

  def loss(W):
    return jnp.sum(jnp.square(f(W, k) - v)) / 2

  def of_head(gate, array):
    return gate.reshape(gate.shape[:2] + (1,) * (array.ndim - 2))

  def write(A, gradient):
    if spec.forget_gate:
      A = of_head(jnp.exp(log_beta), A) * A
    return A - of_head(eta, A) * gradient

  W_start = state.layers
  if state.position is not None:  # stale gradients
    W_start = contract.batched_where(
      state.position == 0, state.layers, state.starts
    )
  A = W = jax.tree.map(write, state.layers, jax.grad(loss)(W_start))
  if c is not None:
    W = jax.tree.map(lambda A, W: W + of_head(c, A) * (A - W), A, W_start)
  y = f(W, q)

  state = state._replace(
    layers=A, segment_id=contract.next_segment_id(state.segment_id)
  )
  if state.position is not None:
    position = (state.position + 1) % spec.chunk_size
    state = state._replace(
      layers=contract.batched_where(position == 0, W, A),
      starts=contract.batched_where(position == 0, W, W_start),
      position=position,
    )
  return state, y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
