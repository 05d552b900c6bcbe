"""Spec, Inputs and State of Lattice."""

import dataclasses
from typing import NamedTuple

import jax

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
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: `[batch, heads, slots]`: it reads y = S q.
    key: `[batch, heads, slots]`, the latent code of the value.
    value: `[batch, heads, value]`.
    log_decay: log mu <= 0, `[batch, heads, 1]`.
    write_rate: gamma >= 0, `[batch, heads, 1]`.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  log_decay: jax.Array
  write_rate: jax.Array


class State(NamedTuple):
  """Everything needed to continue a sequence.

  Attributes:
    memory: S, `[batch, heads, value, slots]`, float32 or wider; its columns
      are the slots, of norm 1 where the update is "normalized" (with stale
      gradients at chunk starts, and at most sqrt(tokens) inside a chunk).
    memory_start: S at the start of the current chunk, equal to `memory` (and
      never read) while `position` is 0; only with stale gradients, None
      otherwise.
    write_rate_sum: `[batch, heads]`, write rates since the chunk started; only
      with stale gradients and sparsity, None otherwise.
    position: int32 `[batch]`, tokens since the chunk started, in
      [0, chunk_size); only with stale gradients, None otherwise.
    segment_id: int32 `[batch]`, the current segment, 0 before any token.
  """

  memory: jax.Array
  memory_start: jax.Array | None
  write_rate_sum: jax.Array | None
  position: jax.Array | None
  segment_id: jax.Array
