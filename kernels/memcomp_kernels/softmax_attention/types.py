"""Spec, Inputs and State of softmax attention."""

import dataclasses
from typing import NamedTuple

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """The meaning of the attention: changing a field changes the function.

  Attributes:
    window_size: tokens that a token sees, itself included, >= 1; None is all
      that the state can hold.
    sink_tokens: of them, first tokens of the segment that are seen for ever
      (StreamingLLM); fewer than `window_size`.
    chunk_size: the window moves by whole chunks: the token at position p sees
      positions from (p // chunk_size + 1) * chunk_size - window_size on, so
      between window_size - chunk_size + 1 and window_size tokens (the window of
      Key-Value Means). Divides `window_size`; None moves it by tokens.
    scale: of the scores; None is key_dim ** -0.5.
  """

  window_size: int | None = None
  sink_tokens: int = 0
  chunk_size: int | None = None
  scale: float | None = None

  def __post_init__(self):
    for name in ("window_size", "chunk_size"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f"{name}={value} must be at least 1, or None")
    if self.sink_tokens < 0:
      raise ValueError(f"sink_tokens={self.sink_tokens} must not be negative")
    if self.window_size is not None and self.sink_tokens >= self.window_size:
      raise ValueError(
        f"sink_tokens={self.sink_tokens} must be less than"
        f" window_size={self.window_size}: the newest token needs a place"
      )
    if self.chunk_size is not None:
      if self.window_size is None or self.window_size % self.chunk_size:
        raise ValueError(
          f"chunk_size={self.chunk_size} must divide"
          f" window_size={self.window_size}"
        )
      if self.sink_tokens:
        raise ValueError(
          f"chunk_size={self.chunk_size} must be None with"
          f" sink_tokens={self.sink_tokens}"
        )
    if self.scale is not None and not self.scale > 0:
      raise ValueError(f"scale={self.scale} must be positive, or None")


class Inputs(NamedTuple):
  """What one token brings; `reference` and `chunk` add a time axis at 1.

  Attributes:
    query: `[batch, heads, key]`.
    key: `[batch, kv_heads, key]`; kv_heads divides heads, and query head h
      reads head h // (heads / kv_heads) of keys and values.
    value: `[batch, kv_heads, value]`.
    sink_query: `[batch, heads, key]`, the query as the first `sink_tokens` of a
      segment meet it: StreamingLLM counts its position in the window, not in
      the text; None where it is `query`.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  sink_query: jax.Array | None = None


class State(NamedTuple):
  """Everything needed to continue a sequence; `primitives.window` has the rows.

  Attributes:
    keys: `[batch, kv_heads, size, key]`, float32 or wider.
    values: `[batch, kv_heads, size, value]`.
    position: int32 `[batch]`, tokens of the current segment so far.
    segment_id: int32 `[batch]`, the current segment, 0 before any token.
  """

  keys: jax.Array
  values: jax.Array
  position: jax.Array
  segment_id: jax.Array
