"""Spec, Inputs and State of Trellis."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels.primitives import activations

GRADIENT_AT = ("chunk_start", "token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of a Trellis memory: changing a field changes the function.

  Attributes:
    num_slots: rows m of both memories, >= 1.
    phi: the activation inside the loss |phi(M w) - target|^2 of both passes.
    phi_eps: inside phi's layer norm or L2 norm. It bounds phi's Jacobian by
      about 1 / sqrt(eps); 1e-6 is the literal layer norm, whose gradients
      spike on real text, 1.0 trains best.
    read_activation: f, between the two passes' reads.
    read_eps: inside f's layer norm or L2 norm.
    gradient_at: where the loss gradient is taken: "chunk_start" (the paper's
      mini-batch form: at the memory before the chunk, for all its tokens) or
      "token" (at the memory before each token: the paper's b = 1).
    chunk_size: tokens that share a chunk-start gradient, >= 1. Ignored by
      "token".
    forget_gate: if False, `log_decay` is ignored and nothing decays.
    value_readout_phi: apply phi to the output of the second read.
    first_order: stop the gradient at z = M w, where the inner gradient is
      taken (an ablation: no differentiation through the inner step).
  """

  num_slots: int = 64
  phi: str = "ln_silu"
  phi_eps: float = 1.0
  read_activation: str = "ln_silu"
  read_eps: float = 1e-6
  gradient_at: str = "chunk_start"
  chunk_size: int = 16
  forget_gate: bool = True
  value_readout_phi: bool = False
  first_order: bool = False

  def __post_init__(self):
    for name in ("phi", "read_activation"):
      value = getattr(self, name)
      if value not in activations.ACTIVATIONS:
        choices = ", ".join(activations.ACTIVATIONS)
        raise ValueError(f"{name}={value!r} is not one of: {choices}")
    if self.gradient_at not in GRADIENT_AT:
      choices = ", ".join(GRADIENT_AT)
      raise ValueError(
        f"gradient_at={self.gradient_at!r} is not one of: {choices}"
      )
    for name in ("num_slots", "chunk_size"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    for name in ("phi_eps", "read_eps"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be positive")

  @property
  def stale(self) -> bool:
    """Whether several tokens share one chunk-start gradient."""
    return self.gradient_at == "chunk_start" and self.chunk_size > 1

  def eps(self, log_phi_eps: jax.Array | None) -> jax.Array | float:
    """Returns phi's eps where tokens bring `log_phi_eps`, or do not."""
    return self.phi_eps if log_phi_eps is None else jnp.exp(log_phi_eps)


class Inputs(NamedTuple):
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: `[batch, heads, key]`, reads pass 1.
    key: `[batch, heads, key]`, written in pass 1.
    value: `[batch, heads, value]`, written in pass 2.
    target: alpha, `[batch, heads, slots]`, the code both passes write.
    log_decay: log beta <= 0, `[batch, heads, passes]`; one pass is shared by
      both, two are key pass and value pass.
    write_rate: gamma >= 0, `[batch, heads, passes]`, as `log_decay`.
    log_phi_eps: log of phi's eps, `[batch, heads, 1]`; None takes
      `Spec.phi_eps`. A logarithm, so that a learned eps stays positive and
      the zeros of an empty place are an eps of 1.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  target: jax.Array
  log_decay: jax.Array
  write_rate: jax.Array
  log_phi_eps: jax.Array | None = None


class State(NamedTuple):
  """Everything needed to continue a sequence.

  Attributes:
    key_memory: M_K, `[batch, heads, slots, key]`, float32 or wider.
    value_memory: M_V, `[batch, heads, slots, value]`.
    key_memory_start: M_K at the start of the current chunk, equal to
      `key_memory` (and never read) while `position` is 0; only with stale
      gradients, None otherwise.
    value_memory_start: M_V there.
    position: int32 `[batch]`, tokens since the chunk started, in
      [0, chunk_size); only with stale gradients, None otherwise.
    segment_id: int32 `[batch]`, the current segment, 0 before any token.
  """

  key_memory: jax.Array
  value_memory: jax.Array
  key_memory_start: jax.Array | None
  value_memory_start: jax.Array | None
  position: jax.Array | None
  segment_id: jax.Array
