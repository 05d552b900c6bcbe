"""The slot attention mixer: projections and gates around the memory.

  gated    q, k, v = silu(x W);  alpha = sigmoid(x W_f)^(1/8) for each slot
           -> memory -> W_o RMSNorm(silu(y))       (GSA, arXiv 2409.07146)
  softmax  q, k turned by position, v;  s = clip(x W_s) for each slot
           -> memory -> W_o (RMSNorm(y) * silu(x W_g))
                                                    (ABC, arXiv 2110.02488)

docs/slot_attention.md has the choices.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import (
  linear,
  mixer,
  norm,
  positions,
  rotary,
  short_convolution,
)
from memcomp_kernels.slot_attention import api as slot_attention


@dataclasses.dataclass(kw_only=True, slots=True)
class SlotAttentionConfig(mixer.MixerConfig):
  """A slot attention mixer; first the fields of the kernel's `Spec`.

  The defaults are Gated Slot Attention's.

  Attributes:
    num_slots: rows of each memory, of every head.
    rule: "gated" or "softmax".
    scale: of the scores of slots; None is key_dim ** -0.5.
    heads: memories side by side.
    key_dim: features of a head's query and key.
    value_dim: features of a head's value.
    silu_inputs: SiLU on query, key and value.
    gate_divisor: c of alpha = sigmoid(.)^(1/c), with "gated".
    logit_limit: write logits are clipped to +- this, with "softmax".
    rotary_dim: channels of query and key turned by position; even, 0 for none.
    output_gate: what is read is normalised in each head, then gated by SiLU of
      a projection; if False, SiLU of it is normalised over all heads.
    convolution_width: taps of short convolutions on query, key and value; 0
      for none.
  """

  num_slots: int = 64
  rule: str = "gated"
  scale: float | None = 1.0
  heads: int = 12
  key_dim: int = 64
  value_dim: int = 64
  silu_inputs: bool = True
  gate_divisor: float = 8.0
  logit_limit: float = 32.0
  rotary_dim: int = 0
  output_gate: bool = False
  convolution_width: int = 0

  def spec(self) -> slot_attention.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    fields = dataclasses.fields(slot_attention.Spec)
    return slot_attention.Spec(
      **{field.name: getattr(self, field.name) for field in fields}
    )

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.spec()
    mixer.require_positive(self, "heads", "key_dim", "value_dim")
    for name in ("gate_divisor", "logit_limit"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be positive")
    if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.key_dim:
      raise ValueError(
        f"rotary_dim={self.rotary_dim} must be even and in"
        f" [0, key_dim={self.key_dim}]"
      )
    if self.convolution_width < 0 or self.convolution_width == 1:
      raise ValueError(
        f"convolution_width={self.convolution_width} must be 0 or at least 2"
      )

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
  """Attention with bounded-memory control: the same fields, its defaults."""

  rule: str = "softmax"
  scale: float | None = None
  silu_inputs: bool = False
  rotary_dim: int = 64
  output_gate: bool = True


class SlotAttentionState(NamedTuple):
  """State of the mixer.

  Attributes:
    query_taps: of the convolution, None without; also key and value.
    key_taps: likewise.
    value_taps: likewise.
    position: int32 `[batch]`, tokens of the segment so far; None without
      rotary positions.
    memory: of the kernel.
  """

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  position: jax.Array | None
  memory: slot_attention.State


class SlotAttention(nnx.Module):
  """The slot attention mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: SlotAttentionConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    heads, taps = config.heads, config.convolution_width
    key_width, value_width = heads * config.key_dim, heads * config.value_dim

    def project(width):
      return linear.Linear(
        d_model, width, ("embed", "heads"), std=std, rngs=rngs
      )

    self.query = project(key_width)
    self.key = project(key_width)
    self.value = project(value_width)
    self.control = project(heads * config.num_slots)
    self.gate = nnx.data(None)
    if config.output_gate:
      self.gate = project(value_width)
      self.post_norm = norm.RMSNorm(
        config.value_dim, name="value_dim", eps=1e-5
      )
    else:
      self.post_norm = norm.RMSNorm(value_width, name="heads", eps=1e-5)
    self.out = linear.Linear(
      value_width, d_model, ("heads", "embed"), std=out_std, rngs=rngs
    )
    make = short_convolution.make
    self.query_convolution = make(key_width, taps, rngs=rngs)
    self.key_convolution = make(key_width, taps, rngs=rngs)
    self.value_convolution = make(value_width, taps, rngs=rngs)
    self.rotary = rotary.Rotary(dim=config.rotary_dim)
    self.spec = config.spec()
    self.heads = heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim
    self.silu_inputs = config.silu_inputs
    self.gate_divisor = config.gate_divisor
    self.logit_limit = config.logit_limit

  def init_state(
    self, batch: int, length: int | None = None
  ) -> SlotAttentionState:
    """The state before the first token: empty memories."""
    del length
    taps = short_convolution.init_taps
    return SlotAttentionState(
      taps(self.query_convolution, batch),
      taps(self.key_convolution, batch),
      taps(self.value_convolution, batch),
      jnp.zeros(batch, jnp.int32) if self.rotary.dim else None,
      slot_attention.init_state(
        self.spec,
        batch=batch,
        heads=self.heads,
        key_dim=self.key_dim,
        value_dim=self.value_dim,
      ),
    )

  def memories(self, state: SlotAttentionState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return state.memory.key_memory, state.memory.value_memory

  def _inputs(self, x, state: SlotAttentionState, segment_ids):
    """Projects `[batch, time, d_model]`; returns the state but its memory."""
    segment_id = state.memory.segment_id
    convolve = functools.partial(
      short_convolution.apply, segment_ids=segment_ids, segment_id=segment_id
    )
    query, query_taps = convolve(
      self.query_convolution, self.query(x), state.query_taps
    )
    key, key_taps = convolve(self.key_convolution, self.key(x), state.key_taps)
    value, value_taps = convolve(
      self.value_convolution, self.value(x), state.value_taps
    )
    if self.silu_inputs:
      query, key, value = map(jax.nn.silu, (query, key, value))
    query, key, value, control = (
      linear.split_heads(y, self.heads)
      for y in (query, key, value, self.control(x))
    )
    position = state.position
    if position is not None:
      places, position = positions.advance(
        segment_ids, segment_id, position, x.shape[1]
      )
      query, key = self.rotary(query, places), self.rotary(key, places)
    control = control.astype(jnp.promote_types(x.dtype, jnp.float32))
    inputs = slot_attention.Inputs(query=query, key=key, value=value)
    if self.spec.rule == "gated":
      log_decay = jax.nn.log_sigmoid(control) / self.gate_divisor
      inputs = inputs._replace(log_decay=log_decay)
    else:
      limit = self.logit_limit
      inputs = inputs._replace(write_logit=jnp.clip(control, -limit, limit))
    state = state._replace(
      query_taps=query_taps,
      key_taps=key_taps,
      value_taps=value_taps,
      position=position,
    )
    return inputs, state

  def _output(self, x: jax.Array, y: jax.Array) -> jax.Array:
    if self.gate is None:
      y = y.reshape(*x.shape[:-1], -1)
      return self.out(self.post_norm(jax.nn.silu(y)))
    y = self.post_norm(y).reshape(*x.shape[:-1], -1)
    return self.out(y * jax.nn.silu(self.gate(x)))

  def __call__(
    self, x: jax.Array, state: SlotAttentionState, context: mixer.Context
  ) -> tuple[jax.Array, SlotAttentionState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    segment_ids = context.segment_ids
    inputs, state = self._inputs(x, state, segment_ids)
    chunk = sharding.on_mesh(slot_attention.chunk)
    fresh = self.init_state(x.shape[0]).memory
    memory, y = chunk(
      state.memory,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=fresh if segment_ids is not None else None,
    )
    return self._output(x, y), state._replace(memory=memory)

  def step(
    self, x: jax.Array, state: SlotAttentionState, context: mixer.Context
  ) -> tuple[jax.Array, SlotAttentionState]:
    """Mixes one token: `[batch, d_model]` in constant time."""
    del context
    x = x[:, None]
    inputs, state = self._inputs(x, state, None)
    memory, y = slot_attention.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    return self._output(x, y[:, None])[:, 0], state._replace(memory=memory)
