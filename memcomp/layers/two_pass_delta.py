"""The mixer around the two-pass delta rule.

x -> W_x, W_q -> source, query (of length 1);  W_k, W_v -> k, v
alpha = sigmoid, theta = softplus, both linear in (k, v) of a head
-> memory -> RMS norm -> W_o                     (docs/two_pass_delta.md)
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, norm, positions
from memcomp_kernels.primitives import activations
from memcomp_kernels.two_pass_delta import api as two_pass_delta

READ_PATHS = ("query", "key")


@dataclasses.dataclass(kw_only=True, slots=True)
class TwoPassDeltaConfig(mixer.MixerConfig):
  """A two-pass delta mixer; first the fields of the kernel's `Spec`.

  Attributes:
    key_weight_decay: of the first pass's memory.
    value_weight_decay: of the second pass's memory.
    read_first: a token is read before it is written.
    code_eps: inside the norm of a code.
    heads: memories side by side.
    key_dim: features of a head's source, query and key.
    value_dim: features of a head's value.
    read_path: what is read: a "query" of its own, or the "key".
    normalize: sources and what is read have length 1.
    decay_init: 1 - alpha at the start, in (0, 1).
    write_rate_init: theta at the start, > 0.
    rate_bound: theta becomes theta b / (b + theta), below b; 0 for none. With
      sources of length 1, steps of the first pass overshoot from 2 on.
    code_rate: the second pass takes theta over key_dim, the square of a code's
      length; if False theta itself, as described, which overshoots from
      2 / key_dim on.
    write_every: only every such token of a segment is written, >= 1.
  """

  key_weight_decay: float = 0.0
  value_weight_decay: float = 0.0
  read_first: bool = False
  code_eps: float = 1e-6
  heads: int = 12
  key_dim: int = 64
  value_dim: int = 64
  read_path: str = "query"
  normalize: bool = True
  decay_init: float = 0.982
  write_rate_init: float = 0.5
  rate_bound: float = 1.0
  code_rate: bool = True
  write_every: int = 1

  def spec(self) -> two_pass_delta.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    fields = dataclasses.fields(two_pass_delta.Spec)
    return two_pass_delta.Spec(
      **{field.name: getattr(self, field.name) for field in fields}
    )

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.spec()
    mixer.require_positive(self, "heads", "key_dim", "value_dim", "write_every")
    if self.read_path not in READ_PATHS:
      raise ValueError(
        f"read_path={self.read_path!r} is not one of: {', '.join(READ_PATHS)}"
      )
    if not 0 < self.decay_init < 1:
      raise ValueError(f"decay_init={self.decay_init} must be in (0, 1)")
    if not self.write_rate_init > 0:
      raise ValueError(f"write_rate_init={self.write_rate_init} must be > 0")
    if not self.rate_bound >= 0:
      raise ValueError(
        f"rate_bound={self.rate_bound} must be positive, or 0 for none"
      )

  def state_floats(self, length: int) -> int:
    """Floats of both memories for any length, for one layer."""
    del length
    return self.heads * self.key_dim * (self.key_dim + self.value_dim)

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, for one layer.

    Multiply-adds count two. Both passes: the error, the write, a read; and the
    code of the token, one more read of the first.
    """
    del length
    first, second = self.key_dim, self.value_dim
    return self.heads * self.key_dim * (8 * first + 6 * second)


class TwoPassDeltaState(NamedTuple):
  """State of the mixer.

  Attributes:
    position: int32 `[batch]`, tokens of the segment so far; None where every
      token is written.
    memory: of the kernel.
  """

  position: jax.Array | None
  memory: two_pass_delta.State


class TwoPassDelta(nnx.Module):
  """The two-pass delta mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: TwoPassDeltaConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    heads = config.heads
    key_width, value_width = heads * config.key_dim, heads * config.value_dim

    def project(width):
      return linear.Linear(
        d_model, width, ("embed", "heads"), std=std, rngs=rngs
      )

    self.source = project(key_width)
    self.query = nnx.data(None)
    if config.read_path == "query":
      self.query = project(key_width)
    self.key = project(key_width)
    self.value = project(value_width)
    self.gates = linear.normal_param(
      rngs,
      (heads, config.key_dim + config.value_dim, 2),
      ("heads", None, None),
      std=std,
    )
    # Of the logit of 1 - alpha, and of softplus^-1(theta).
    bias = (
      linear.logit(config.decay_init),
      math.log(math.expm1(config.write_rate_init)),
    )
    self.gate_bias = linear.constant_param(
      jnp.tile(jnp.array(bias), (heads, 1)), ("heads", None)
    )
    self.post_norm = norm.RMSNorm(value_width, name="heads")
    self.out = linear.Linear(
      value_width, d_model, ("heads", "embed"), std=out_std, rngs=rngs
    )
    self.spec = config.spec()
    self.heads = heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim
    self.normalize = config.normalize
    self.rate_bound = config.rate_bound
    self.code_rate = config.code_rate
    self.write_every = config.write_every

  def init_state(
    self, batch: int, length: int | None = None
  ) -> TwoPassDeltaState:
    """The state before the first token: empty memories."""
    del length
    memory = two_pass_delta.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
    )
    position = None
    if self.write_every > 1:
      position = jnp.zeros(batch, jnp.int32)
    return TwoPassDeltaState(position, memory)

  def memories(self, state: TwoPassDeltaState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return state.memory.key_memory, state.memory.value_memory

  def _inputs(self, x, state: TwoPassDeltaState, segment_ids):
    """Projects `[batch, time, d_model]` to inputs, and the next position."""
    source, key, value = (
      linear.split_heads(project(x), self.heads)
      for project in (self.source, self.key, self.value)
    )
    query = key
    if self.query is not None:
      query = linear.split_heads(self.query(x), self.heads)
    if self.normalize:
      source, query = activations.unit(source), activations.unit(query)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    both = jnp.concatenate([key, value], axis=-1).astype(wide)
    logits = jnp.einsum("bthi,hig->bthg", both, self.gates[...])
    logits = logits + self.gate_bias[...]
    rate = jax.nn.softplus(logits[..., 1:])
    if self.rate_bound:
      rate = rate * self.rate_bound / (self.rate_bound + rate)
    if self.code_rate:
      rate = jnp.concatenate([rate, rate / self.key_dim], axis=-1)
    position, active = state.position, None
    if position is not None:
      places, position = positions.advance(
        segment_ids, state.memory.segment_id, position, x.shape[1]
      )
      active = (places % self.write_every == 0).astype(wide)
      active = jnp.broadcast_to(active[..., None, None], (*rate.shape[:3], 1))
    inputs = two_pass_delta.Inputs(
      query=query,
      source=source,
      key=key,
      value=value,
      log_decay=jax.nn.log_sigmoid(logits[..., :1]),
      write_rate=rate,
      active=active,
    )
    return inputs, position

  def _output(self, y: jax.Array) -> jax.Array:
    return self.out(self.post_norm(y.reshape(*y.shape[:-2], -1)))

  def __call__(
    self, x: jax.Array, state: TwoPassDeltaState, context: mixer.Context
  ) -> tuple[jax.Array, TwoPassDeltaState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    segment_ids = context.segment_ids
    inputs, position = self._inputs(x, state, segment_ids)
    chunk = sharding.on_mesh(two_pass_delta.chunk)
    fresh = self.init_state(x.shape[0]).memory
    memory, y = chunk(
      state.memory,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=fresh if segment_ids is not None else None,
    )
    return self._output(y), TwoPassDeltaState(position, memory)

  def step(
    self, x: jax.Array, state: TwoPassDeltaState, context: mixer.Context
  ) -> tuple[jax.Array, TwoPassDeltaState]:
    """Mixes one token: `[batch, d_model]` in constant time."""
    del context
    inputs, position = self._inputs(x[:, None], state, None)
    memory, y = two_pass_delta.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    return self._output(y[:, None])[:, 0], TwoPassDeltaState(position, memory)
