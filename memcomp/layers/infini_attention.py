"""The Infini-attention mixer (arXiv 2404.07143).

x -> q, k, v (`layers.projection`) -> local attention with rotary positions, and
a linear memory of q and k without them. A learned gate per head mixes the two:

  y = (sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot) W_o           eq. (6)

docs/infini_attention.md explains our choices and those of Tensor Cache's
baseline.
"""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp.layers import base, linear, options, parameters, projection, rotary
from memcomp_kernels import contract, infini_attention
from memcomp_kernels.options import inside, option


@options.config_class
class InfiniAttentionConfig(projection.ProjectionConfig):
  """Options of Infini-attention, in addition to `ProjectionConfig`.

  Attributes:
    window_size: number of newest tokens in local attention; 0 attends to the
      current segment.
    rotate_memory: whether the memory's queries and keys are also rotated.
    gate_init: initial weight of the memory, in (0, 1).
  """

  op = infini_attention
  left_out = ("eps",)

  window_size: int = 0
  rotate_memory: bool = False
  gate_init: float = option(0.5, inside(0, 1))

  def derived(self) -> dict[str, Any]:
    """The window, if there is one."""
    return {"window_size": self.window_size or None}


class InfiniAttention(projection.ProjectedMixer):
  """Infini-attention: projections around window and memory."""

  Config = InfiniAttentionConfig
  memory_fields = ("association.memory",)

  def build(self, config: InfiniAttentionConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    self.projection = projection.Projection(
      config, self.d_model, std=make.std, rngs=make.rngs
    )
    # The layer rotates later, because the memory takes unrotated keys.
    self.rotary = self.projection.rotary
    self.projection.rotary = rotary.Rotary(dim=0)
    self.out = make.out(self.heads * self.value_dim)
    self.read_gate = linear.constant_param(
      jnp.full(self.heads, linear.logit(config.gate_init)), ("heads",)
    )
    self.rotate_memory = config.rotate_memory

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    memory = state.memory
    query, key, value, state = self.project(x, state, call)
    positions = contract.token_positions(
      call.segment_ids, memory.segment_id, memory.position, x.shape[1]
    )
    gate = jax.nn.sigmoid(base.wide(self.read_gate[...]))
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
