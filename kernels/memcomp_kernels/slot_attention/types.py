"""Spec, Inputs and State of slot attention."""

import dataclasses
from typing import NamedTuple

import jax

RULES = ("gated", "softmax")

EMPTY = -1e30
"""The log of no weight at all: finite, so that differences are numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of a slot attention memory.

  Attributes:
    num_slots: rows of each memory, >= 1.
    rule: how slots take tokens up: "gated" (Gated Slot Attention: a decay for
      each slot, writes are what decay leaves room for) or "softmax" (attention
      with bounded-memory control: each slot is a softmax average over tokens).
    scale: of the scores of slots; None is key_dim ** -0.5.
  """

  num_slots: int = 64
  rule: str = "gated"
  scale: float | None = 1.0

  def __post_init__(self):
    if self.num_slots < 1:
      raise ValueError(f"num_slots={self.num_slots} must be at least 1")
    if self.rule not in RULES:
      raise ValueError(f"rule={self.rule!r} is not one of: {', '.join(RULES)}")
    if self.scale is not None and not self.scale > 0:
      raise ValueError(f"scale={self.scale} must be positive, or None")

  def score_scale(self, key_dim: int) -> float:
    """The number that scores are multiplied by."""
    return key_dim**-0.5 if self.scale is None else self.scale


class Inputs(NamedTuple):
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: `[batch, heads, key]`.
    key: `[batch, heads, key]`.
    value: `[batch, heads, value]`.
    log_decay: log alpha <= 0, `[batch, heads, slots]`, with "gated"; else None.
    write_logit: s, `[batch, heads, slots]`, with "softmax"; else None.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  log_decay: jax.Array | None = None
  write_logit: jax.Array | None = None


class State(NamedTuple):
  """Everything needed to continue a sequence.

  Attributes:
    key_memory: K~, `[batch, heads, slots, key]`, float32 or wider.
    value_memory: V~, `[batch, heads, slots, value]`.
    log_total: z, the log of the sum of exp(s) so far, `[batch, heads, slots]`,
      `EMPTY` before any token, with "softmax"; else None.
    segment_id: int32 `[batch]`, the current segment, 0 before any token.
  """

  key_memory: jax.Array
  value_memory: jax.Array
  log_total: jax.Array | None
  segment_id: jax.Array
