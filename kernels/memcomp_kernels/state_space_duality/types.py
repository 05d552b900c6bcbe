"""Spec, Inputs and State of state space duality."""

import dataclasses
from typing import Annotated, NamedTuple

import jax

from memcomp_kernels.shapes import If


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of the state space model: a field changes the function.

  Attributes:
    heads_per_group: heads, which follow each other, that share a query and a
      key, >= 1; divides the number of heads.
    skip: whether an output has D x added; if not, `Inputs.skip` is None.
  """

  heads_per_group: int = 1
  skip: bool = True

  def __post_init__(self):
    if self.heads_per_group < 1:
      raise ValueError(
        f"heads_per_group={self.heads_per_group} must be at least 1"
      )


class Inputs(NamedTuple):
  """What one token brings; `step` takes it without the axis `time`.

  Heads of a group share query and key.

  Attributes:
    query: C.
    key: B.
    value: x.
    log_decay: dt A <= 0.
    write_rate: dt >= 0.
    skip: D; None without `Spec.skip`.
  """

  query: Annotated[jax.Array, "batch time heads/heads_per_group key_dim"]
  key: Annotated[jax.Array, "batch time heads/heads_per_group key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1"]
  write_rate: Annotated[jax.Array, "batch time heads 1"]
  skip: Annotated[jax.Array | None, "batch time heads 1", If("skip")] = None


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    memory: h.
    segment_id: the current segment, 0 before any token.
  """

  memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]
