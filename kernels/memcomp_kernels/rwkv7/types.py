"""Spec, Inputs and State of RWKV-7."""

import dataclasses
from typing import Annotated, NamedTuple

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
  """What one token brings; `step` takes it without the axis `time`.

  Attributes:
    query: the receptance r.
    key: the replacement key k~, what is written by.
    value: what is written.
    removal_key: kappa^, of length 1: what is removed.
    log_decay: log w <= 0, of every channel.
    write_rate: the in-context learning rate a in [0, 1] of every channel: how
      much of `removal_key` is removed.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  removal_key: Annotated[jax.Array, "batch time heads key_dim"]
  log_decay: Annotated[jax.Array, "batch time heads key_dim"]
  write_rate: Annotated[jax.Array, "batch time heads key_dim"]


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    memory: S.
    segment_id: the current segment, 0 before any token.
  """

  memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]
