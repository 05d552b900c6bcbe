"""The slot attention mixer: projections and gates around the memory.

  gated    q, k, v = silu(x W);  alpha = sigmoid(x W_f)^(1/8) for each slot
           -> memory -> W_o RMSNorm(silu(y))       (GSA, arXiv 2409.07146)
  softmax  q, k turned by position, v;  s = clip(x W_s) for each slot
           -> memory -> W_o (RMSNorm(y) * silu(x W_g))
                                                    (ABC, arXiv 2110.02488)

docs/slot_attention.md has the choices.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import base, norm, options, positions, rotary
from memcomp_kernels.slot_attention import api as slot_attention

option = options.option
_NORM_EPS = 1e-5
_SPEC = slot_attention.Spec()


@dataclasses.dataclass(kw_only=True, slots=True)
class SlotAttentionConfig(options.MixerConfig):
  """Options of slot attention; the first are those of the kernel's `Spec`.

  The defaults are Gated Slot Attention's.

  Attributes:
    num_slots: rows of each memory, of every head.
    rule: "gated" or "softmax".
    scale: of the scores of slots; None is key_dim ** -0.5.
    silu_inputs: SiLU on query, key and value.
    gate_divisor: c of alpha = sigmoid(.)^(1/c), with "gated".
    logit_limit: write logits are clipped to +- this, with "softmax".
    rotary_dim: channels of query and key turned by position; even, 0 for none.
    output_gate: what is read is normalised in each head, then gated by SiLU of
      a projection; if False, SiLU of it is normalised over all heads.
    convolution_width: taps of short convolutions on query, key and value; 0
      for none.
  """

  Spec = slot_attention.Spec

  num_slots: int = _SPEC.num_slots
  rule: str = _SPEC.rule
  scale: float | None = _SPEC.scale
  silu_inputs: bool = True
  gate_divisor: float = option(8.0, options.positive)
  logit_limit: float = option(32.0, options.positive)
  rotary_dim: int | None = 0
  output_gate: bool = False
  convolution_width: int = option(0, options.taps)

  def fill(self, d_model: int) -> dict[str, object]:
    """The sizes that are left to the rule; None rotates the whole key."""
    found = options.MixerConfig.fill(self, d_model)
    return found | rotary.fill(self, found)

  def check(self) -> None:
    """Raises ValueError where the rotated channels do not fit the key."""
    rotary.check(self)

  def state_floats(self, length: int) -> int:
    """Floats of the memory per sequence of any length, for one layer."""
    del length
    dims = self.key_dim + self.value_dim + (self.rule == "softmax")
    return self.heads * self.num_slots * dims

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, for one layer.

    Multiply-adds count two. Token form: both passes' write and read.
    """
    del length
    return 4 * self.heads * self.num_slots * (self.key_dim + self.value_dim)


@dataclasses.dataclass(kw_only=True, slots=True)
class BoundedMemoryConfig(SlotAttentionConfig):
  """Options of attention with bounded-memory control: other defaults.

  Published: keys of half the width.
  """

  rule: str = "softmax"
  scale: float | None = None
  silu_inputs: bool = False
  rotary_dim: int | None = None
  output_gate: bool = True

  def widths(self, d_model: int) -> tuple[int, int, int]:
    """Heads whose values have 64 features and whose keys have half of them."""
    return max(1, d_model // 64), max(1, d_model // 2), d_model


class SlotAttentionState(NamedTuple):
  """State of the mixer.

  Attributes:
    query_taps: of the convolution, None without; also key and value.
    key_taps: of keys.
    value_taps: of values.
    position: int32 `[batch]`, tokens of the segment so far; None without
      rotary positions.
    memory: of the kernel.
  """

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  position: jax.Array | None
  memory: slot_attention.State


class SlotAttention(base.Mixer):
  """Gated slot attention; `BoundedMemory` is the same with other defaults."""

  Config = SlotAttentionConfig
  op = base.Op(
    slot_attention.init_state, slot_attention.chunk, slot_attention.step
  )
  memory_fields = ("key_memory", "value_memory")

  def build(self, config: SlotAttentionConfig, make: base.Make) -> None:
    """Makes the parameters."""
    keys, values = self.heads * self.key_dim, self.heads * self.value_dim
    self.query, self.key = make.project(keys), make.project(keys)
    self.value = make.project(values)
    self.control = make.project(self.heads * config.num_slots)
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
    """The state before the first token: empty memories."""
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
      places, position = positions.advance(
        call.segment_ids, state.memory.segment_id, state.position, x.shape[1]
      )
      query, key = self.rotary(query, places), self.rotary(key, places)
      state = state._replace(position=position)
    inputs = slot_attention.Inputs(query=query, key=key, value=value)
    if self.spec.rule == "gated":
      log_decay = jax.nn.log_sigmoid(control) / self.gate_divisor
      return inputs._replace(log_decay=log_decay), state
    limit = self.logit_limit
    return inputs._replace(write_logit=jnp.clip(control, -limit, limit)), state

  def outputs(self, x, y):
    """Norm, gate, output projection."""
    if self.gate is None:
      y = y.reshape(*x.shape[:-1], -1)
      return self.out(self.post_norm(jax.nn.silu(y)))
    y = self.post_norm(y).reshape(*x.shape[:-1], -1)
    return self.out(y * jax.nn.silu(self.gate(x)))


class BoundedMemory(SlotAttention):
  """Attention with bounded-memory control (ABC)."""

  Config = BoundedMemoryConfig
