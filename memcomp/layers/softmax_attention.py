"""Softmax attention: all tokens, a window, a window with sinks, or in blocks.

x -> q, k, v (`layers.projection`) -> attention -> W_o. With rotary positions
and nothing else it is the attention of Transformer++; with `window_size` a
sliding window, with `sink_tokens` too StreamingLLM, with `chunk_size` a window
aligned to blocks; with `kv_heads` grouped-query attention (arXiv 2305.13245);
with the options of `layers.projection` GPTAlpha-2.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, projection
from memcomp_kernels import contract
from memcomp_kernels.softmax_attention import api as attention

SINK_POSITIONS = ("window", "text")


@dataclasses.dataclass(kw_only=True, slots=True)
class SoftmaxAttentionConfig(projection.ProjectionConfig):
  """Softmax attention; further fields are those of `ProjectionConfig`.

  Attributes:
    kv_heads: heads of keys and values, a divisor of `heads`: query head h reads
      head h // (heads / kv_heads); 0 for as many as `heads`.
    window_size: newest tokens that are attended to; 0 for all.
    sink_tokens: first tokens that are attended to for ever, beside a window.
    sink_positions: how far away sinks are: "window" counts positions in the
      window, so never more than window_size - 1 (StreamingLLM, section 3.2);
      "text" those in the text.
    chunk_size: the window starts at a multiple of it; 0 for none.
    max_length: tokens that full attention keeps where no length is given; the
      oldest give way to more.
  """

  kv_heads: int = 0
  window_size: int = 0
  sink_tokens: int = 0
  sink_positions: str = "window"
  chunk_size: int = 0
  max_length: int = 8192

  def spec(self) -> attention.Spec:
    """The meaning of the attention.

    Raises:
      ValueError: naming the field that is out of range.
    """
    return attention.Spec(
      window_size=self.window_size or None,
      sink_tokens=self.sink_tokens,
      chunk_size=self.chunk_size or None,
    )

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.validate_projection()
    mixer.require_positive(self, "max_length")
    if self.sink_positions not in SINK_POSITIONS:
      raise ValueError(
        f"sink_positions={self.sink_positions!r} is not one of:"
        f" {', '.join(SINK_POSITIONS)}"
      )
    if self.kv_heads < 0 or self.heads % (self.kv_heads or self.heads):
      raise ValueError(
        f"kv_heads={self.kv_heads} must divide heads={self.heads}, or be 0 for"
        " as many"
      )
    self.spec()

  def state_floats(self, length: int) -> int:
    """Floats of keys and values after `length` tokens, for one layer."""
    kept = min(length, self.window_size) if self.window_size else length
    heads = self.kv_heads or self.heads
    return heads * kept * (self.key_dim + self.value_dim)

  def memory_flops(self, length: int) -> int:
    """Mean forward flops of scores and sums per token, for one layer."""
    window = min(self.window_size or length, length)
    pairs = window * (window + 1) // 2 + (length - window) * window
    dims = self.key_dim + self.value_dim
    return 2 * self.heads * dims * pairs // length


class SoftmaxAttentionState(NamedTuple):
  """State of the projections and of the attention."""

  projection: projection.ProjectionState
  memory: attention.State


class SoftmaxAttention(nnx.Module):
  """The softmax attention mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: SoftmaxAttentionConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    self.kv_heads = config.kv_heads or config.heads
    self.projection = projection.Projection(
      config, d_model, kv_heads=self.kv_heads, std=std, rngs=rngs
    )
    self.out = linear.Linear(
      config.heads * config.value_dim,
      d_model,
      ("heads", "embed"),
      std=out_std,
      rngs=rngs,
    )
    self.spec = config.spec()
    self.key_dim, self.value_dim = config.key_dim, config.value_dim
    self.max_length = config.max_length
    self.turns_for_sinks = (
      config.sink_positions == "window"
      and min(config.sink_tokens, config.window_size, config.rotary_dim) > 0
    )

  def at_depth(self, depth: jax.Array) -> None:
    """Starts as a layer at `depth` in [0, 1)."""
    self.projection.at_depth(depth)

  def value_of(self, x: jax.Array) -> jax.Array:
    """The value projection of `x`, for the value residuals of later layers."""
    return self.projection.value(x)

  def init_state(
    self, batch: int, length: int | None = None
  ) -> SoftmaxAttentionState:
    """The state before the first token, with room for `length` tokens."""
    return SoftmaxAttentionState(
      self.projection.init_state(batch), self._memory(batch, length)
    )

  def _memory(self, batch, length):
    return attention.init_state(
      self.spec,
      batch=batch,
      heads=self.kv_heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
      length=self.max_length if length is None else length,
    )

  def memories(self, state: SoftmaxAttentionState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return state.memory.keys, state.memory.values

  def _inputs(self, x, state, context):
    query, key, value, projected = self.projection(
      x,
      state.projection,
      context,
      segment_id=state.memory.segment_id,
      position=state.memory.position,
    )
    sink_query = self._sink_query(query, state, context)
    return attention.Inputs(query, key, value, sink_query), projected

  def _sink_query(self, query, state, context):
    """The query at its position in the window; None where that is in the text.

    Beyond the window's length all but sinks are as far away as in the text.
    """
    window, time = self.spec.window_size, query.shape[1]
    if not self.turns_for_sinks or window is None:
      return None
    if context.seen is not None and context.seen + time <= window:
      return None
    positions = contract.token_positions(
      context.segment_ids, state.memory.segment_id, state.memory.position, time
    )
    # A rotation of what is rotated already.
    back = jnp.minimum(window - 1 - positions, 0)
    return self.projection.rotary(query, back)

  def __call__(
    self,
    x: jax.Array,
    state: SoftmaxAttentionState,
    context: mixer.Context,
  ) -> tuple[jax.Array, SoftmaxAttentionState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    inputs, projected = self._inputs(x, state, context)
    chunk = sharding.on_mesh(
      attention.chunk, over_time=attention.over_time(self.spec)
    )
    # Where `state` is fresh it is what new segments start from, too.
    fresh = None
    if context.segment_ids is not None and context.seen != 0:
      # As many rows as this state has, whatever length it was made for.
      fresh = self._memory(x.shape[0], state.memory.keys.shape[2])
    memory, y = chunk(
      state.memory,
      inputs,
      spec=self.spec,
      segment_ids=context.segment_ids,
      reset_state=fresh,
      seen=context.seen,
    )
    y = self.out(y.reshape(*x.shape[:2], -1))
    return y, SoftmaxAttentionState(projected, memory)

  def step(
    self,
    x: jax.Array,
    state: SoftmaxAttentionState,
    context: mixer.Context,
  ) -> tuple[jax.Array, SoftmaxAttentionState]:
    """Mixes one token `[batch, d_model]`."""
    if context.first_value is not None:
      first = context.first_value[:, None]
      context = context._replace(first_value=first)
    inputs, projected = self._inputs(x[:, None], state, context)
    memory, y = attention.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    return (
      self.out(y.reshape(x.shape[0], -1)),
      SoftmaxAttentionState(projected, memory),
    )
