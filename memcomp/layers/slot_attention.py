"""The slot attention mixer: projections and gates around the memory.

  gated    q, k, v = silu(x W);  alpha = sigmoid(x W_f)^(1/8) for each slot
           -> memory -> W_o (RMSNorm(y) * silu(x W_g))
                                                    (GSA, arXiv 2409.07146)
  softmax  q, k turned by position, v;  s = clip(x W_s) for each slot
           -> memory -> W_o (RMSNorm(y) * silu(x W_g))
                                                    (ABC, arXiv 2110.02488)

docs/slot_attention.md explains our choices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import (
  base,
  convolved,
  linear,
  norm,
  options,
  parameters,
  positions,
  rotary,
)
from memcomp_kernels import slot_attention
from memcomp_kernels.options import option, positive

_NORM_EPS = 1e-5


@options.config_class
class SlotAttentionConfig(options.MixerConfig):
  """Options of slot attention, with the defaults of Gated Slot Attention.

  The output gate is the exception: GSA was released without one.

  Attributes:
    silu_inputs: whether SiLU is applied to query, key and value.
    gate_divisor: c of alpha = sigmoid(.)^(1/c), for "gated".
    logit_limit: write logits are clipped to +- this, for "softmax".
    rotary_dim: query and key channels that are rotated; even, 0 for none.
    output_gate: if True, each head's read is normalized, then gated by SiLU of
      a projection. If False, SiLU of the read is normalized over all heads.
    convolution_width: taps of short convolutions on query, key and value; 0 for
      none.
  """

  op = slot_attention

  silu_inputs: bool = True
  gate_divisor: float = option(8.0, positive)
  logit_limit: float = option(32.0, positive)
  rotary_dim: int | None = 0
  output_gate: bool = True
  convolution_width: int = option(0, options.taps)

  def fill(self, d_model: int) -> dict[str, object]:
    """The sizes that the rule determines; None rotates the whole key."""
    found = options.MixerConfig.fill(self, d_model)
    return found | rotary.fill(self, found)

  def check(self) -> None:
    """Raises ValueError if the rotated channels do not fit the key."""
    rotary.check(self)


@options.config_class
class BoundedMemoryConfig(SlotAttentionConfig):
  """Options of attention with bounded-memory control.

  Only the defaults differ: keys have half the width. The short convolutions are
  not of the paper.
  """

  rule: str = "softmax"
  scale: float | None = None
  silu_inputs: bool = False
  rotary_dim: int | None = None
  convolution_width: int = option(4, options.taps)

  def widths(self, d_model: int) -> tuple[int, int, int]:
    """Sizes for heads with 64 value features and 32 key features."""
    return max(1, d_model // 64), max(1, d_model // 2), d_model


class SlotAttentionState(NamedTuple):
  """State of the mixer.

  Attributes:
    query_taps: last inputs of the query convolution; None without one.
    key_taps: last inputs of the key convolution; None without one.
    value_taps: last inputs of the value convolution; None without one.
    position: int32 `[batch]`, tokens of the segment so far; None without rotary
      positions.
    memory: the op's state.
  """

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  position: jax.Array | None
  memory: slot_attention.State


class SlotAttention(convolved.ConvolvedMixer):
  """Gated slot attention; `BoundedMemory` has other defaults."""

  Config = SlotAttentionConfig
  memory_fields = ("key_memory", "value_memory")

  def build(self, config: SlotAttentionConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    keys, values = self.heads * self.key_dim, self.heads * self.value_dim
    self.query, self.key = make.project(keys), make.project(keys)
    self.value = make.project(values)
    self.control = make.project(self.heads * self.spec.num_slots)
    self.gate = nnx.data(None)
    if config.output_gate:
      self.gate = make.project(values)
      self.post_norm = norm.RMSNorm(
        self.value_dim, name="value_dim", eps=_NORM_EPS
      )
    else:
      self.post_norm = norm.RMSNorm(values, name="heads", eps=_NORM_EPS)
    self.out = make.out(values)
    width = config.convolution_width
    self.query_convolution = make.convolution(keys, width)
    self.key_convolution = make.convolution(keys, width)
    self.value_convolution = make.convolution(values, width)
    self.rotary = rotary.Rotary(dim=config.rotary_dim or 0)
    self.silu_inputs = config.silu_inputs
    self.gate_divisor = config.gate_divisor
    self.logit_limit = config.logit_limit

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> SlotAttentionState:
    """The state before the first token, with empty memories."""
    del length
    position = jnp.zeros(batch, jnp.int32) if self.rotary.dim else None
    return SlotAttentionState(
      **self.fresh_taps(batch),
      position=position,
      memory=self.init_memory(batch),
    )

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    projected, state = self.convolved(
      state, call, self.query(x), self.key(x), self.value(x)
    )
    if self.silu_inputs:
      projected = map(jax.nn.silu, projected)
    query, key, value = map(self.split, projected)
    control = base.wide(self.split(self.control(x)))
    if state.position is not None:
      token_positions, position = positions.advance(
        call.segment_ids, state.memory.segment_id, state.position, x.shape[1]
      )
      query, key = (self.rotary(a, token_positions) for a in (query, key))
      state = state._replace(position=position)
    inputs = slot_attention.Inputs(query=query, key=key, value=value)
    if self.spec.rule == "gated":
      log_decay = jax.nn.log_sigmoid(control) / self.gate_divisor
      return inputs._replace(log_decay=log_decay), state
    limit = self.logit_limit
    return inputs._replace(write_logit=jnp.clip(control, -limit, limit)), state

  def outputs(self, x, y):
    """Applies norm, gate and output projection."""
    if self.gate is None:
      y = linear.join_heads(y)
      return self.out(self.post_norm(jax.nn.silu(y)))
    y = linear.join_heads(self.post_norm(y))
    return self.out(y * jax.nn.silu(self.gate(x)))


class BoundedMemory(SlotAttention):
  """Attention with bounded-memory control (ABC)."""

  Config = BoundedMemoryConfig
