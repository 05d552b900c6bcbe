"""Spec, Inputs and State of the two-pass delta rule."""

import dataclasses
from typing import NamedTuple

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
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: r, `[batch, heads, source]`, what is read: a query, or again the
      token's key.
    source: x, `[batch, heads, source]`, what the first pass writes by.
    key: k, `[batch, heads, key]`, what it should answer.
    value: v, `[batch, heads, value]`, what the second pass should answer.
    log_decay: log(1 - alpha) <= 0, `[batch, heads, 1]`.
    write_rate: theta >= 0, `[batch, heads, 1]`, or `[batch, heads, 2]` with a
      rate for each pass. Steps overshoot from theta |x|^2 = 2 on in the first
      pass, from theta key_dim = 2 on in the second.
    active: `[batch, heads, 1]`, 1 where the token writes, 0 where it only
      reads and both memories stay as they are; None is 1.
  """

  query: jax.Array
  source: jax.Array
  key: jax.Array
  value: jax.Array
  log_decay: jax.Array
  write_rate: jax.Array
  active: jax.Array | None = None


class State(NamedTuple):
  """Everything needed to continue a sequence.

  Attributes:
    key_memory: S_K, `[batch, heads, source, key]`, float32 or wider.
    value_memory: S_V, `[batch, heads, key, value]`.
    segment_id: int32 `[batch]`, the current segment, 0 before any token.
  """

  key_memory: jax.Array
  value_memory: jax.Array
  segment_id: jax.Array
