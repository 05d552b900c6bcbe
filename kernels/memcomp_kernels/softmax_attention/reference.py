"""Softmax attention token by token.

  y_t = sum_j p_{t,j} v_j,   p_t = softmax over j of scale <q_t, k_j>

The sum is over the tokens j that t sees, t itself included. These are the first
`sink_tokens` of its segment and the last window_size - sink_tokens, except
those that a window which moves by chunks has dropped. A `window` holds them.
Heads of queries share keys and values by groups (arXiv 2305.13245): head h
reads those of head h // (heads / kv_heads).
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, window
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import (
  at_least,
  not_negative,
  option,
  options,
  positive,
)
from memcomp_kernels.shapes import If


@options
class Spec:
  """The options of the attention; changing a field changes the function.

  Attributes:
    window_size: number of tokens that a token sees, itself included, >= 1. None
      means all that the state can hold.
    sink_tokens: how many of them are first tokens of the segment, which stay
      visible for ever (StreamingLLM); fewer than `window_size`.
    chunk_size: makes the window move by whole chunks. The token at position p
      sees positions from (p // chunk_size + 1) * chunk_size - window_size on,
      that is between window_size - chunk_size + 1 and window_size tokens (the
      window of Key-Value Means). It divides `window_size`. None moves the
      window by tokens.
    scale: factor of the scores; None is key_dim ** -0.5.
  """

  window_size: int | None = option(None, at_least(1))
  sink_tokens: int = option(0, not_negative)
  chunk_size: int | None = option(None, at_least(1))
  scale: float | None = option(None, positive)

  def __post_init__(self):
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


class Inputs(NamedTuple):
  """The inputs of one token; `step` takes them without the axis `time`.

  Attributes:
    query: query with `query_heads`, a multiple of `heads`. Head h of the
      queries reads head h // (query_heads / heads) of keys and values.
    key: the key to attend to.
    value: the value to read.
    sink_query: query for the first `sink_tokens` of a segment. StreamingLLM
      counts its position in the window and not in the text. None means
      `query`.
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

  It has room for `length` tokens, in the rows of a `window`.

  Attributes:
    keys: keys of the tokens that are kept.
    values: values of the tokens that are kept.
    position: tokens of the current segment so far.
    segment_id: the current segment, 0 before any token.
  """

  keys: Annotated[jax.Array, "batch heads length key_dim"]
  values: Annotated[jax.Array, "batch heads length value_dim"]
  position: Annotated[jax.Array, "batch", "int32"]
  segment_id: Annotated[jax.Array, "batch", "int32"]


def step(
  state: State, inputs: Inputs, *, spec: Spec
) -> tuple[State, jax.Array]:
  """Writes one token, then reads; see `Op.step`."""
  dtype = state.keys.dtype
  q, k, v = (x.astype(dtype) for x in inputs[:3])
  t = state.position
  (K, V), _, _ = window.push(
    (state.keys, state.values), (k, v), t, sink_tokens=spec.sink_tokens
  )
  j = window.held(t + 1, size=K.shape[2], sink_tokens=spec.sink_tokens)
  seen = j >= 0
  if spec.chunk_size is not None and spec.window_size is not None:
    end_of_chunk = (t // spec.chunk_size + 1) * spec.chunk_size
    seen &= j >= end_of_chunk[:, None] - spec.window_size
  scale = contract.read_scale(spec, q.shape[-1])

  def products(q, K):
    shared = q.shape[1] // max(K.shape[1], 1)
    groups = q.reshape(q.shape[0], K.shape[1], shared, q.shape[-1])
    return scale * einsum("bhgd,bhjd->bhgj", groups, K)

  scores = products(q, K)
  if inputs.sink_query is not None:
    sinks, ring = jnp.split(K, [spec.sink_tokens], axis=2)
    scores = jnp.concatenate(
      [products(inputs.sink_query.astype(dtype), sinks), products(q, ring)],
      axis=-1,
    )
  p = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
  y = einsum("bhgj,bhjd->bhgd", p, V).reshape(*q.shape[:2], V.shape[-1])
  state = State(
    keys=K,
    values=V,
    position=t + 1,
    segment_id=contract.next_segment_id(state.segment_id),
  )
  return state, y.astype(inputs.query.dtype)
