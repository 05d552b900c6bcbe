"""Spec, Inputs and State of the delta rule."""

import dataclasses
from typing import Annotated, NamedTuple

import jax

from memcomp_kernels.shapes import If


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
  """What one token brings; `step` takes it without the axis `time`.

  Attributes:
    query: what reads the memory.
    key: of length 1, or the memory may grow without end.
    value: what is written.
    log_decay: log alpha <= 0; ignored without `Spec.forget_gate`.
    write_rate: beta in [0, 1], or in [0, 2] for transitions with negative
      eigenvalues (arXiv 2411.12537).
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1", If("forget_gate")]
  write_rate: Annotated[jax.Array, "batch time heads 1"]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    memory: S.
    segment_id: the current segment, 0 before any token.
  """

  memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]
