"""Spec, Inputs and State of Lattice."""

import dataclasses
from typing import Annotated, NamedTuple

import jax

from memcomp_kernels.shapes import If

OBJECTIVES = ("decoding", "encoding", "similarity")
UPDATES = ("delta", "orthogonal", "normalized")
GRADIENT_AT = ("chunk_start", "token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of a Lattice memory: changing a field changes the function.

  Attributes:
    num_slots: columns m of the memory, >= 1.
    objective: the inner loss: "decoding" |Phi k - v|^2 (eq. 6), "encoding"
      |Phi^T v - k|^2 (eq. 9) or "similarity" -<Phi^T v, k> (eq. 11).
    update: the rungs of the paper's ablation. "delta": the loss is taken on
      the memory itself, no projection. "orthogonal": eq. 13, along the tangent
      and over the column's norm. "normalized": eq. 14, the same and columns
      renormalised: Lattice.
    forget_gate: the L2 variant, eq. 16. If False, `log_decay` is ignored.
    sparsity: lambda of the L1 variant, eq. 18, >= 0: entries are
      soft-thresholded by write_rate * sparsity after a write, before
      renormalisation. 0 is off.
    gradient_at: where the loss gradient is taken: "token" (the paper: at the
      memory before each token) or "chunk_start" (at the memory before the
      chunk, for all its tokens).
    chunk_size: tokens that share a chunk-start gradient, >= 1. Ignored by
      "token".
  """

  num_slots: int = 64
  objective: str = "decoding"
  update: str = "normalized"
  forget_gate: bool = True
  sparsity: float = 0.0
  gradient_at: str = "chunk_start"
  chunk_size: int = 16

  def __post_init__(self):
    for name, choices in (
      ("objective", OBJECTIVES),
      ("update", UPDATES),
      ("gradient_at", GRADIENT_AT),
    ):
      value = getattr(self, name)
      if value not in choices:
        raise ValueError(
          f"{name}={value!r} is not one of: {', '.join(choices)}"
        )
    for name in ("num_slots", "chunk_size"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    if not self.sparsity >= 0:
      raise ValueError(f"sparsity={self.sparsity} must not be negative")

  @property
  def stale(self) -> bool:
    """Whether several tokens share one chunk-start gradient."""
    return self.gradient_at == "chunk_start" and self.chunk_size > 1

  @property
  def unit_columns(self) -> bool:
    """Whether columns are kept on the unit sphere."""
    return self.update == "normalized"

  @property
  def sums_rates(self) -> bool:
    """Whether a chunk's end needs the sum of its write rates."""
    return self.stale and self.sparsity > 0


class Inputs(NamedTuple):
  """What one token brings; `step` takes it without the axis `time`.

  Attributes:
    query: q, which reads y = S q.
    key: k, the latent code of the value.
    value: v.
    log_decay: log mu <= 0; ignored without `Spec.forget_gate`.
    write_rate: gamma >= 0.
  """

  query: Annotated[jax.Array, "batch time heads num_slots"]
  key: Annotated[jax.Array, "batch time heads num_slots"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1", If("forget_gate")]
  write_rate: Annotated[jax.Array, "batch time heads 1"]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    memory: S. Its columns are the slots, of norm 1 where the update is
      "normalized" (at most sqrt(tokens) inside a chunk, with gradients at chunk
      starts).
    memory_start: S at the start of the current chunk, equal to `memory` (and
      never read) while `position` is 0; only with gradients at chunk starts,
      None otherwise.
    write_rate_sum: write rates since the chunk started; only with gradients at
      chunk starts and sparsity, None otherwise.
    position: tokens since the chunk started, in [0, chunk_size); only with
      gradients at chunk starts, None otherwise.
    segment_id: the current segment, 0 before any token.
  """

  memory: Annotated[jax.Array, "batch heads value_dim num_slots"]
  memory_start: Annotated[
    jax.Array | None, "batch heads value_dim num_slots", If("stale")
  ]
  write_rate_sum: Annotated[jax.Array | None, "batch heads", If("sums_rates")]
  position: Annotated[jax.Array | None, "batch", "int32", If("stale")]
  segment_id: Annotated[jax.Array, "batch", "int32"]
