"""Spec, Inputs and State of the two-pass delta rule."""

import dataclasses
from typing import Annotated, NamedTuple

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of a two-pass delta memory: each field changes the function.

  Attributes:
    key_weight_decay: lambda_k >= 0, of the first pass's memory.
    value_weight_decay: lambda_v >= 0, of the second pass's memory.
    read_first: a token is read before it is written; default after.
    code_eps: inside the norm of a code, > 0. It bounds that norm's Jacobian by
      about sqrt(key_dim / eps).
  """

  key_weight_decay: float = 0.0
  value_weight_decay: float = 0.0
  read_first: bool = False
  code_eps: float = 1e-6

  def __post_init__(self):
    for name in ("key_weight_decay", "value_weight_decay"):
      if not getattr(self, name) >= 0:
        raise ValueError(f"{name}={getattr(self, name)} must not be negative")
    if not self.code_eps > 0:
      raise ValueError(f"code_eps={self.code_eps} must be positive")


class Inputs(NamedTuple):
  """What one token brings; `step` takes it without the axis `time`.

  Attributes:
    query: r, what is read: a query, or again the token's key.
    source: x, what the first pass writes by.
    key: k, what the first pass should answer.
    value: v, what the second pass should answer.
    log_decay: log(1 - alpha) <= 0.
    write_rate: theta >= 0, one for both passes or one for each. Steps overshoot
      from theta |x|^2 = 2 on in the first pass, from theta key_dim = 2 on in
      the second.
    active: 1 where the token writes, 0 where it only reads and both memories
      stay as they are; None is 1.
  """

  query: Annotated[jax.Array, "batch time heads source_dim"]
  source: Annotated[jax.Array, "batch time heads source_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[jax.Array, "batch time heads 1"]
  write_rate: Annotated[jax.Array, "batch time heads 1|2"]
  active: Annotated[jax.Array | None, "batch time heads 1"] = None


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    key_memory: S_K.
    value_memory: S_V.
    segment_id: the current segment, 0 before any token.
  """

  key_memory: Annotated[jax.Array, "batch heads source_dim key_dim"]
  value_memory: Annotated[jax.Array, "batch heads key_dim value_dim"]
  segment_id: Annotated[jax.Array, "batch", "int32"]
