"""Spec, Inputs and State of softmax attention."""

import dataclasses
from typing import Annotated, NamedTuple

import jax

from memcomp_kernels.shapes import If


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
  """What one token brings; `step` takes it without the axis `time`.

  Attributes:
    query: of `query_heads`, a multiple of `heads`: head h of the queries reads
      head h // (query_heads / heads) of keys and values.
    key: what is attended to.
    value: what is read.
    sink_query: the query as the first `sink_tokens` of a segment meet it:
      StreamingLLM counts its position in the window, not in the text; None
      where it is `query`.
  """

  query: Annotated[jax.Array, "batch time query_heads key_dim"]
  key: Annotated[jax.Array, "batch time heads key_dim"]
  value: Annotated[jax.Array, "batch time heads value_dim"]
  sink_query: Annotated[
    jax.Array | None,
    "batch time query_heads key_dim",
    If("sink_tokens", required=False),
  ] = None


class State(NamedTuple):
  """Everything needed to continue a sequence; floats are float32 or wider.

  It has room for `length` tokens, as `window` lays them.

  Attributes:
    keys: of the tokens that are kept.
    values: of the tokens that are kept.
    position: tokens of the current segment so far.
    segment_id: the current segment, 0 before any token.
  """

  keys: Annotated[jax.Array, "batch heads length key_dim"]
  values: Annotated[jax.Array, "batch heads length value_dim"]
  position: Annotated[jax.Array, "batch", "int32"]
  segment_id: Annotated[jax.Array, "batch", "int32"]
