"""Spec, Inputs and State of state space duality."""

import dataclasses
from typing import NamedTuple

import jax


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
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: C, `[batch, groups, key]`, groups = heads / heads_per_group.
    key: B, `[batch, groups, key]`.
    value: x, `[batch, heads, value]`.
    log_decay: dt A <= 0, `[batch, heads, 1]`.
    write_rate: dt >= 0, `[batch, heads, 1]`.
    skip: D, `[batch, heads, 1]`; see `Spec.skip`.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  log_decay: jax.Array
  write_rate: jax.Array
  skip: jax.Array | None = None


class State(NamedTuple):
  """Everything needed to continue a sequence.

  Attributes:
    memory: h, `[batch, heads, key, value]`, float32 or wider.
    segment_id: int32 `[batch]`, the current segment, 0 before any token.
  """

  memory: jax.Array
  segment_id: jax.Array
