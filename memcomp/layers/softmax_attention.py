"""Softmax attention over all tokens, a window, a window with sinks, or blocks.

x -> q, k, v (`layers.projection`) -> attention -> W_o. The options give:

  defaults (rotary positions)    attention of Transformer++
  window_size                    sliding window
  window_size, sink_tokens       StreamingLLM
  window_size, chunk_size        window aligned to blocks
  kv_heads                       grouped-query attention (arXiv 2305.13245)
  those of `layers.projection`   GPTAlpha-2
"""

from typing import Any

import jax.numpy as jnp

from memcomp.layers import options, parameters, projection
from memcomp_kernels import contract
from memcomp_kernels import softmax_attention as attention
from memcomp_kernels.options import at_least, not_negative, one_of, option

SINK_POSITIONS = ("window", "text")


@options.config_class
class SoftmaxAttentionConfig(projection.ProjectionConfig):
  """Options of softmax attention, in addition to `ProjectionConfig`.

  Attributes:
    kv_heads: number of key and value heads, a divisor of `heads`; 0 for as many
      as `heads`. Query head h reads head h // (heads / kv_heads).
    window_size: number of newest tokens to attend to; 0 for all.
    sink_positions: how the distance to sinks is measured. "window" counts
      positions in the window, at most window_size - 1 (StreamingLLM, section
      3.2). "text" counts positions in the text.
    chunk_size: the window starts at a multiple of it; 0 for none.
    max_length: number of tokens that full attention keeps if no length is
      given. Newer tokens then replace the oldest.
  """

  op = attention
  left_out = ("scale",)

  kv_heads: int = option(0, not_negative)
  window_size: int = 0
  sink_positions: str = option("window", one_of(SINK_POSITIONS))
  chunk_size: int = 0
  max_length: int = option(8192, at_least(1))

  def derived(self) -> dict[str, Any]:
    """The sizes of window and chunk, if there are any."""
    return {
      "window_size": self.window_size or None,
      "chunk_size": self.chunk_size or None,
    }

  def check(self) -> None:
    """Raises ValueError if fields contradict each other."""
    projection.ProjectionConfig.check(self)
    if self.heads and self.heads % (self.kv_heads or self.heads):
      raise ValueError(
        f"kv_heads={self.kv_heads} must divide heads={self.heads}, or be 0 for"
        " as many"
      )


class SoftmaxAttention(projection.ProjectedMixer):
  """Softmax attention: projections around attention."""

  Config = SoftmaxAttentionConfig
  memory_fields = ("keys", "values")

  def build(
    self, config: SoftmaxAttentionConfig, make: parameters.Make
  ) -> None:
    """Makes the parameters."""
    self.kv_heads = config.kv_heads or self.heads
    self.projection = projection.Projection(
      config,
      self.d_model,
      kv_heads=self.kv_heads,
      std=make.std,
      rngs=make.rngs,
    )
    self.out = make.out(self.heads * self.value_dim)
    self.max_length = config.max_length
    self.turns_for_sinks = (
      config.sink_positions == "window"
      and min(self.spec.sink_tokens, config.window_size, config.rotary_dim or 0)
      > 0
    )

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> projection.ProjectedState:
    """The state before the first token, with room for `length` tokens."""
    length = self.max_length if length is None else length
    return projection.ProjectedState(
      self.projection.init_state(batch), self._empty(batch, length)
    )

  def _empty(self, batch, length):
    return self.init_memory(batch, heads=self.kv_heads, length=length)

  def fresh_memory(self, batch, memory, call):
    """An empty memory with as many rows as the given one.

    None if the given memory is fresh: then new segments start from it.
    """
    if call.max_position == 0:
      return None
    return self._empty(batch, memory.keys.shape[2])

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the attention's inputs."""
    query, key, value, new_state = self.project(x, state, call)
    sink_query = self._sink_query(query, state, call)
    return attention.Inputs(query, key, value, sink_query), new_state

  def _sink_query(self, query, state, call):
    """The query at its position in the window; None for text positions.

    Beyond the window's length, only the distance to sinks differs from the
    text.
    """
    window, time = self.spec.window_size, query.shape[1]
    if not self.turns_for_sinks or window is None:
      return None
    if call.max_position is not None and call.max_position + time <= window:
      return None
    positions = contract.token_positions(
      call.segment_ids, state.memory.segment_id, state.memory.position, time
    )
    # The query is already rotated, so this rotates it back.
    back = jnp.minimum(window - 1 - positions, 0)
    return self.projection.rotary(query, back)
