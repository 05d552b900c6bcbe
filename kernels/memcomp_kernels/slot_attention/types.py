"""Spec, Inputs and State of slot attention."""

import dataclasses
from typing import Annotated, NamedTuple

import jax

from memcomp_kernels.shapes import If

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
  """What one token brings; `step` takes it without the axis `time`.

  Attributes:
    query: what reads the slots.
    key: what is written to the slots' keys.
    value: what is written to the slots' values.
    log_decay: log alpha <= 0 of every slot; for rule "gated" alone.
    write_logit: s of every slot; for rule "softmax" alone.
  """

  query: Annotated[jax.Array, "batch time heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  log_decay: Annotated[
    jax.Array | None, "batch time heads num_slots", If("rule", "gated")
  ] = None
  write_logit: Annotated[
    jax.Array | None, "batch time heads num_slots", If("rule", "softmax")
  ] = None


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  Attributes:
    key_memory: K~.
    value_memory: V~.
    log_total: z, the log of the sum of exp(s) so far, `EMPTY` before any token;
      for rule "softmax" alone.
    segment_id: the current segment, 0 before any token.
  """

  key_memory: Annotated[jax.Array, "batch heads num_slots key_dim"]
  value_memory: Annotated[jax.Array, "batch heads num_slots value_dim"]
  log_total: Annotated[
    jax.Array | None, "batch heads num_slots", If("rule", "softmax")
  ]
  segment_id: Annotated[jax.Array, "batch", "int32"]
