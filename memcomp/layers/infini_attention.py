"""The Infini-attention mixer (arXiv 2404.07143).

x -> q, k, v (`layers.projection`) -> local attention with rotary positions, and
a linear memory of q and k without them; a learned gate a head mixes the two

  y = (sigmoid(beta) A_mem + (1 - sigmoid(beta)) A_dot) W_o           eq. (6)

docs/infini_attention.md has the choices, and those of Tensor Cache's baseline.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, projection, rotary
from memcomp_kernels import contract
from memcomp_kernels.infini_attention import api as infini_attention


@dataclasses.dataclass(kw_only=True, slots=True)
class InfiniAttentionConfig(projection.ProjectionConfig):
  """An Infini-attention mixer; further fields are those of `ProjectionConfig`.

  Attributes:
    segment_size: tokens that read the memory of those before all of them; 1 is
      the form per token.
    window_size: newest tokens that are attended to; 0 for the segment's.
    rule: "linear" or "delta".
    rotate_memory: the memory, too, has queries and keys with positions.
    gate_init: the memory's share at the start, in (0, 1).
  """

  segment_size: int = 256
  window_size: int = 0
  rule: str = "delta"
  rotate_memory: bool = False
  gate_init: float = 0.5

  def spec(self) -> infini_attention.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    return infini_attention.Spec(
      segment_size=self.segment_size,
      window_size=self.window_size or None,
      rule=self.rule,
    )

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.validate_projection()
    self.spec()
    if not 0 < self.gate_init < 1:
      raise ValueError(f"gate_init={self.gate_init} must be in (0, 1)")

  def state_floats(self, length: int) -> int:
    """Floats of window and memory after `length` tokens, for one layer."""
    kept = min(length, self.window_size or self.segment_size)
    window = kept * (self.key_dim + self.value_dim)
    memory = self.key_dim * (self.value_dim + 1)
    return self.heads * (window + memory)

  def memory_flops(self, length: int) -> int:
    """Mean forward flops of window and memory per token, for one layer."""
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


class InfiniAttentionState(NamedTuple):
  """State of the projections, and of window and memory."""

  projection: projection.ProjectionState
  memory: infini_attention.State


class InfiniAttention(nnx.Module):
  """The Infini-attention mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: InfiniAttentionConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    # Turned here, after what the memory takes has left.
    self.projection = projection.Projection(
      dataclasses.replace(config, rotary_dim=0), d_model, std=std, rngs=rngs
    )
    self.out = linear.Linear(
      config.heads * config.value_dim,
      d_model,
      ("heads", "embed"),
      std=out_std,
      rngs=rngs,
    )
    self.read_gate = linear.constant_param(
      jnp.full(config.heads, linear.logit(config.gate_init)), ("heads",)
    )
    self.rotary = rotary.Rotary(
      dim=config.rotary_dim,
      base=config.rotary_base,
      frequencies=config.rotary_frequencies,
      scale=config.rotary_scale,
    )
    self.spec = config.spec()
    self.heads = config.heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim
    self.rotate_memory = config.rotate_memory

  def at_depth(self, depth: jax.Array) -> None:
    """Starts as a layer at `depth` in [0, 1)."""
    self.projection.at_depth(depth)

  def value_of(self, x: jax.Array) -> jax.Array:
    """The value projection of `x`, for the value residuals of later layers."""
    return self.projection.value(x)

  def init_state(
    self, batch: int, length: int | None = None
  ) -> InfiniAttentionState:
    """The state before the first token: an empty window, a zero memory."""
    del length
    return InfiniAttentionState(
      self.projection.init_state(batch), self._memory(batch)
    )

  def _memory(self, batch):
    return infini_attention.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
    )

  def memories(self, state: InfiniAttentionState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return (state.memory.association.memory,)

  def _inputs(self, x, state: InfiniAttentionState, context: mixer.Context):
    memory = state.memory
    query, key, value, projected = self.projection(
      x,
      state.projection,
      context,
      segment_id=memory.segment_id,
      position=memory.position,
    )
    positions = contract.token_positions(
      context.segment_ids, memory.segment_id, memory.position, x.shape[1]
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
    return inputs, projected

  def __call__(
    self,
    x: jax.Array,
    state: InfiniAttentionState,
    context: mixer.Context,
  ) -> tuple[jax.Array, InfiniAttentionState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    inputs, projected = self._inputs(x, state, context)
    chunk = sharding.on_mesh(infini_attention.chunk)
    packed = context.segment_ids is not None
    memory, y = chunk(
      state.memory,
      inputs,
      spec=self.spec,
      segment_ids=context.segment_ids,
      reset_state=self._memory(x.shape[0]) if packed else None,
      seen=context.seen,
    )
    y = self.out(y.reshape(*x.shape[:2], -1))
    return y, InfiniAttentionState(projected, memory)

  def step(
    self,
    x: jax.Array,
    state: InfiniAttentionState,
    context: mixer.Context,
  ) -> tuple[jax.Array, InfiniAttentionState]:
    """Mixes one token `[batch, d_model]` in constant time."""
    if context.first_value is not None:
      first = context.first_value[:, None]
      context = context._replace(first_value=first)
    inputs, projected = self._inputs(x[:, None], state, context)
    memory, y = infini_attention.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    y = self.out(y.reshape(x.shape[0], -1))
    return y, InfiniAttentionState(projected, memory)
