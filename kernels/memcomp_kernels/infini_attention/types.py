"""Spec, Inputs and State of Infini-attention."""

import dataclasses
from typing import NamedTuple

import jax

from memcomp_kernels.softmax_attention import types as attention

RULES = ("linear", "delta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of Infini-attention: changing a field changes the function.

  Attributes:
    segment_size: tokens that read the memory as it was before the first of
      them, >= 1. 1 is the form per token: each reads what those before it
      wrote.
    window_size: tokens that local attention sees, the current one included,
      >= 1; None is those of the token's segment (the paper).
    rule: "linear" writes values, "delta" what the memory does not answer yet.
    eps: added to the weights' sum, > 0.
  """

  segment_size: int = 256
  window_size: int | None = None
  rule: str = "delta"
  eps: float = 1e-5

  def __post_init__(self):
    if self.rule not in RULES:
      raise ValueError(f"rule={self.rule!r} is not one of: {', '.join(RULES)}")
    for name in ("segment_size", "window_size"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    if not self.eps > 0:
      raise ValueError(f"eps={self.eps} must be positive")

  @property
  def stale(self) -> bool:
    """Whether several tokens read the memory of one segment's start."""
    return self.segment_size > 1

  def local(self) -> attention.Spec:
    """The local attention's meaning."""
    if self.window_size is not None:
      return attention.Spec(window_size=self.window_size)
    # A window of one chunk that moves by chunks begins where the segment does.
    return attention.Spec(
      window_size=self.segment_size, chunk_size=self.segment_size
    )


class Inputs(NamedTuple):
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: `[batch, heads, key]`, of local attention.
    key: `[batch, heads, key]`, likewise.
    value: `[batch, heads, value]`.
    read_gate: g in [0, 1], `[batch, heads, 1]`, the share of the memory.
    memory_query: `[batch, heads, key]`, before the feature map: what reads the
      memory; None for `query`. The paper's has no rotary position.
    memory_key: `[batch, heads, key]`, likewise what writes; None for `key`.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  read_gate: jax.Array
  memory_query: jax.Array | None = None
  memory_key: jax.Array | None = None


class Association(NamedTuple):
  """What is written; float32 or wider.

  Attributes:
    memory: M, `[batch, heads, key, value]`.
    normalizer: z, `[batch, heads, key]`, the sum of keys' features.
  """

  memory: jax.Array
  normalizer: jax.Array


class State(NamedTuple):
  """Everything needed to continue a sequence.

  Attributes:
    keys: `[batch, heads, window, key]`, of local attention's newest tokens, in
      rows as `primitives.window` lays them; float32 or wider.
    values: `[batch, heads, window, value]`.
    association: with all that has been written so far.
    start: the same before the current segment of `Spec.segment_size` tokens;
      equal to `association` (and never read) between two of them, None in the
      form per token.
    position: int32 `[batch]`, tokens of the current sequence so far.
    segment_id: int32 `[batch]`, the current sequence, 0 before any token.
  """

  keys: jax.Array
  values: jax.Array
  association: Association
  start: Association | None
  position: jax.Array
  segment_id: jax.Array
