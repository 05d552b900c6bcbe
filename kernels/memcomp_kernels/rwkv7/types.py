"""Spec, Inputs and State of RWKV-7."""

import dataclasses
from typing import NamedTuple

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of an RWKV-7 memory: changing a field changes the function.

  Attributes:
    scale: of what is read; None is key_dim ** -0.5.
  """

  scale: float | None = 1.0

  def __post_init__(self):
    if self.scale is not None and not self.scale > 0:
      raise ValueError(f"scale={self.scale} must be positive, or None")

  def read_scale(self, key_dim: int) -> float:
    """The number that reads are multiplied by."""
    return key_dim**-0.5 if self.scale is None else self.scale


class Inputs(NamedTuple):
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: the receptance r, `[batch, heads, key]`.
    key: the replacement key k~, `[batch, heads, key]`, what is written by.
    value: v, `[batch, heads, value]`.
    removal_key: kappa^, `[batch, heads, key]`, of length 1: what is removed.
    log_decay: log w <= 0, `[batch, heads, key]`.
    write_rate: the in-context learning rate a, `[batch, heads, key]`, in
      [0, 1]: how much of it is removed, channel by channel.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  removal_key: jax.Array
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
