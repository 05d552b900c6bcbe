"""The Infini-attention mixer (arXiv 2404.07143).

x -> q, k, v (`layers.projection`) -> local attention with rotary positions, and
a linear memory of q and k without them. A learned gate per head mixes the two:

  y = (sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot) W_o           eq. (6)

docs/infini_attention.md explains our choices and those of Tensor Cache's
baseline.
"""

import dataclasses

import jax
import jax.numpy as jnp

from memcomp.layers import base, linear, options, projection, rotary
from memcomp_kernels import contract, infini_attention

_SPEC = infini_attention.Spec()


@dataclasses.dataclass(kw_only=True, slots=True)
class InfiniAttentionConfig(projection.ProjectionConfig):
  """Options of Infini-attention, in addition to `ProjectionConfig`.

  Attributes:
    segment_size: tokens that read the same memory, the one before all of them;
      1 updates the memory after every token.
    window_size: number of newest tokens in local attention; 0 attends to the
      current segment.
    rule: "linear" or "delta".
    rotate_memory: whether the memory's queries and keys are also rotated.
    gate_init: initial weight of the memory, in (0, 1).
  """

  segment_size: int = _SPEC.segment_size
  window_size: int = _SPEC.window_size or 0
  rule: str = _SPEC.rule
  rotate_memory: bool = False
  gate_init: float = options.option(0.5, options.inside(0, 1))

  def spec(self) -> infini_attention.Spec:
    """The kernel's `Spec`.

    Raises:
      ValueError: naming the field that is out of range.
    """
    return infini_attention.Spec(
      segment_size=self.segment_size,
      window_size=self.window_size or None,
      rule=self.rule,
    )

  def state_floats(self, length: int) -> int:
    """Floats of window and memory after `length` tokens, per layer."""
    kept = min(length, self.window_size or self.segment_size)
    window = kept * (self.key_dim + self.value_dim)
    memory = self.key_dim * (self.value_dim + 1)
    return self.heads * (window + memory)

  def memory_flops(self, length: int) -> int:
    """Mean forward flops of window and memory per token and layer."""
    size = min(self.window_size or self.segment_size, length)
    if self.window_size:
      pairs = size * (size + 1) // 2 + (length - size) * size
    else:
      whole, rest = divmod(length, size)
      pairs = whole * size * (size + 1) // 2 + rest * (rest + 1) // 2
    local = 2 * (self.key_dim + self.value_dim) * pairs // length
    passes = {"linear": 2, "delta": 3}[self.rule]
    memory = 2 * passes * self.key_dim * self.value_dim
    return self.heads * (local + memory)


class InfiniAttention(projection.ProjectedMixer):
  """Infini-attention: projections around window and memory."""

  Config = InfiniAttentionConfig
  op = infini_attention
  memory_fields = ("association.memory",)

  def build(self, config: InfiniAttentionConfig, make: base.Make) -> None:
    """Makes the parameters."""
    # The layer rotates later, because the memory takes unrotated keys.
    self.projection = projection.Projection(
      dataclasses.replace(config, rotary_dim=0),
      self.d_model,
      std=make.std,
      rngs=make.rngs,
    )
    self.out = make.out(self.heads * self.value_dim)
    self.read_gate = linear.constant_param(
      jnp.full(self.heads, linear.logit(config.gate_init)), ("heads",)
    )
    self.rotary = rotary.Rotary(
      dim=config.rotary_dim or 0,
      base=config.rotary_base,
      frequencies=config.rotary_frequencies,
      scale=config.rotary_scale,
      reversed=config.rotary_reversed,
    )
    self.rotate_memory = config.rotate_memory

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    memory = state.memory
    query, key, value, state = self.project(x, state, call)
    positions = contract.token_positions(
      call.segment_ids, memory.segment_id, memory.position, x.shape[1]
    )
    gate = jax.nn.sigmoid(self.read_gate[...].astype(jnp.float32))
    gate = jnp.broadcast_to(gate[:, None], (*query.shape[:3], 1))
    inputs = infini_attention.Inputs(
      query=self.rotary(query, positions),
      key=self.rotary(key, positions),
      value=value,
      read_gate=gate,
    )
    if not self.rotate_memory:
      inputs = inputs._replace(memory_query=query, memory_key=key)
    return inputs, state
