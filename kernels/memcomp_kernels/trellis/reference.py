"""Trellis token by token, as the paper writes it (arXiv 2512.23852).

Symbols: M_K, M_V memories; k, v, q, alpha inputs; beta = exp(log_decay);
gamma = write_rate; C = chunk_size. M' is the memory at the start of the current
chunk. If gradients are taken per token, M' = M_{t-1}.

  loss       l(M; w, alpha) = |phi(M w) - alpha|^2 / 2              eq. (5)-(7)
  gradient   u_t = J_phi(z_t)^T (phi(z_t) - alpha_t), z_t = M' w_t
  update     M_t = beta_t M_{t-1} - gamma_t u_t w_t^T               eq. (8)
  pass 1     w = k on M_K, read  f_t = f(M_{K,t} q_t)
  pass 2     w = v on M_V, read  y_t = M_{V,t}^T f_t                eq. (9)

Both reads come after the write. The paper prints J_phi without the transpose
and drops the loss's factor 2 between (8) and (9). docs/trellis.md lists all
corrections.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.contract import einsum
from memcomp_kernels.math import activations
from memcomp_kernels.options import at_least, one_of, option, options, positive
from memcomp_kernels.shapes import If

GRADIENT_AT = ("chunk_start", "token")


@options
class Spec:
  """The options of a Trellis memory; changing a field changes the function.

  Attributes:
    num_slots: number of rows m of both memories, >= 1.
    phi: the activation inside the loss |phi(M w) - target|^2 of both passes.
    phi_eps: eps inside phi's layer norm or L2 norm. It bounds phi's Jacobian by
      about 1 / sqrt(eps). 1e-6 is the literal layer norm, whose gradients spike
      on real text. 1.0 trains best.
    read_activation: f, the activation between the reads of the two passes.
    read_eps: eps inside f's layer norm or L2 norm.
    gradient_at: where the loss gradient is taken. "chunk_start" is the paper's
      mini-batch form, which takes it at the memory before the chunk for all
      tokens of the chunk. "token" takes it at the memory before each token,
      the paper's b = 1.
    chunk_size: tokens that share a chunk-start gradient, >= 1. "token" ignores
      it.
    forget_gate: if False, `log_decay` is ignored and nothing decays.
    value_readout_phi: whether to apply phi to the output of the second read.
    first_order: whether to stop the gradient at z = M w, where the inner
      gradient is taken. This is an ablation without differentiation through
      the inner step.
  """

  num_slots: int = option(64, at_least(1))
  phi: str = option("ln_silu", one_of(activations.ACTIVATIONS))
  phi_eps: float = option(1.0, positive)
  read_activation: str = option("ln_silu", one_of(activations.ACTIVATIONS))
  read_eps: float = option(1e-6, positive)
  gradient_at: str = option("chunk_start", one_of(GRADIENT_AT))
  chunk_size: int = option(16, at_least(1))
  forget_gate: bool = True
  value_readout_phi: bool = False
  first_order: bool = False

  @property
  def chunked(self) -> bool:
    """Whether tokens of a chunk share the gradient at its start."""
    return self.gradient_at == "chunk_start" and self.chunk_size > 1

  def eps(self, log_phi_eps: jax.Array | None) -> jax.Array | float:
    """Returns phi's eps, per token if the inputs have `log_phi_eps`."""
    return self.phi_eps if log_phi_eps is None else jnp.exp(log_phi_eps)


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: reads in pass 1.
    key: written in pass 1.
    value: written in pass 2.
    target: alpha, the code that both passes write.
    log_decay: log beta <= 0, one for both passes or one for each, key pass
      first. Ignored unless `forget_gate`.
    write_rate: gamma >= 0, one for both passes or one for each, key pass first.
    log_phi_eps: log of phi's eps; None takes `Spec.phi_eps`. It is a logarithm
      so that a learned eps stays positive, and because padding is filled with
      zeros, which then mean an eps of 1.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  target: Annotated[jax.Array, "batch time heads num_slots"]
  log_decay: Annotated[jax.Array, "batch time heads 1|2", If("forget_gate")]
  write_rate: Annotated[jax.Array, "batch time heads 1|2"]
  log_phi_eps: Annotated[jax.Array | None, "batch time heads 1"] = None


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    key_memory: M_K.
    value_memory: M_V.
    key_memory_start: M_K at the start of the current chunk. It equals
      `key_memory` and is never read while `position` is 0. It exists only with
      gradients at chunk starts, and is None otherwise.
    value_memory_start: M_V at the start of the current chunk, as
      `key_memory_start`.
    position: tokens since the chunk started, in [0, chunk_size). It exists only
      with gradients at chunk starts, and is None otherwise.
    segment_id: the current segment, 0 before any token.
  """

  key_memory: Annotated[jax.Array, "batch heads num_slots key_dim"]
  value_memory: Annotated[jax.Array, "batch heads num_slots value_dim"]
  key_memory_start: Annotated[
    jax.Array | None, "batch heads num_slots key_dim", If("chunked")
  ]
  value_memory_start: Annotated[
    jax.Array | None, "batch heads num_slots value_dim", If("chunked")
  ]
  position: Annotated[jax.Array | None, "batch", "int32", If("chunked")]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def _gates(inputs: Inputs, spec: Spec, dtype) -> tuple:
  """Returns (beta_K, beta_V), (gamma_K, gamma_V), each `[batch, heads]`."""
  log_decay = inputs.log_decay.astype(dtype)
  beta, gamma = jnp.exp(log_decay), inputs.write_rate.astype(dtype)
  return (beta[..., 0], beta[..., -1]), (gamma[..., 0], gamma[..., -1])


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  dtype = state.key_memory.dtype
  q, k, v, alpha, log_eps = jax.tree.map(
    lambda x: x.astype(dtype),
    (inputs.query, inputs.key, inputs.value, inputs.target, inputs.log_phi_eps),
  )
  beta, gamma = _gates(inputs, spec, dtype)
  eps = spec.eps(log_eps)

  def write(M, M_start, w, beta, gamma):
    z = einsum("bhmd,bhd->bhm", M_start, w)
    if spec.first_order:
      z = lax.stop_gradient(z)
    u = activations.write_direction(spec.phi, z, alpha, eps)
    M = beta[..., None, None] * M
    return M - gamma[..., None, None] * u[..., :, None] * w[..., None, :]

  M_K, M_V = state.key_memory, state.value_memory
  start_K, start_V = M_K, M_V
  if state.position is not None:  # chunk-start gradients
    start_K, start_V = contract.batched_where(
      state.position == 0,
      (M_K, M_V),
      (state.key_memory_start, state.value_memory_start),
    )
  M_K = write(M_K, start_K, k, beta[0], gamma[0])
  M_V = write(M_V, start_V, v, beta[1], gamma[1])

  f = activations.activate(
    spec.read_activation, einsum("bhmd,bhd->bhm", M_K, q), spec.read_eps
  )
  y = einsum("bhmd,bhm->bhd", M_V, f)
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
