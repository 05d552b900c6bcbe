"""Spec, Inputs and State of the delta rule."""

import dataclasses
from typing import NamedTuple

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of a delta rule memory: changing a field changes the function.

  Attributes:
    forget_gate: whether the memory decays (Gated DeltaNet); if False
      (DeltaNet), `log_decay` is ignored.
    scale: of the read, > 0; None is key_dim ** -0.5.
  """

  forget_gate: bool = True
  scale: float | None = None

  def __post_init__(self):
    if self.scale is not None and not self.scale > 0:
      raise ValueError(f"scale={self.scale} must be positive, or None")

  def read_scale(self, key_dim: int) -> float:
    """The factor of a read."""
    return key_dim**-0.5 if self.scale is None else self.scale


class Inputs(NamedTuple):
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: `[batch, heads, key]`.
    key: `[batch, heads, key]`, of length 1, or the memory may grow without
      end.
    value: `[batch, heads, value]`.
    log_decay: log alpha <= 0, `[batch, heads, 1]`; see `Spec.forget_gate`.
    write_rate: beta, `[batch, heads, 1]`, in [0, 1], or [0, 2] for transitions
      with negative eigenvalues (arXiv 2411.12537).
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  log_decay: jax.Array
  write_rate: jax.Array


class State(NamedTuple):
  """Everything needed to continue a sequence.

  Attributes:
    memory: S, `[batch, heads, key, value]`, float32 or wider.
    segment_id: int32 `[batch]`, the current segment, 0 before any token.
  """

  memory: jax.Array
  segment_id: jax.Array
