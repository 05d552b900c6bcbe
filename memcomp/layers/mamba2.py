"""The Mamba2 mixer around state space duality (arXiv 2405.21060, section 7).

x -> z, (x, B, C), dt -> a short convolution of x, B, C -> SiLU -> state space
duality with dt = softplus(dt + dt_bias), A = -exp(A_log), and D x added -> RMS
norm of y * SiLU(z) -> W_o (docs/state_space_duality.md).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, norm, short_convolution, step_size
from memcomp_kernels import hand_off
from memcomp_kernels.state_space_duality import api as state_space_duality

# exp(A_log) at the start is drawn from U(1, 16).
_DECAY_RATES = {"smallest_rate": 1.0, "largest_rate": 16.0}
_NORM_EPS = 1e-5


@dataclasses.dataclass(kw_only=True, slots=True)
class Mamba2Config(mixer.MixerConfig):
  """A Mamba2 mixer.

  Attributes:
    heads: side by side; heads * value_dim is 2 d_model in the paper.
    key_dim: features of B and C, the state size.
    value_dim: features of a head's x.
    groups: of heads that share B and C, dividing `heads`; the output norm is
      taken in as many parts.
    convolution_width: taps of the short convolution on x, B and C; 0 for none.
  """

  heads: int = 24
  key_dim: int = 128
  value_dim: int = 64
  groups: int = 1
  convolution_width: int = 4

  def spec(self) -> state_space_duality.Spec:
    """The memory's meaning."""
    return state_space_duality.Spec(heads_per_group=self.heads // self.groups)

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    mixer.require_positive(self, "heads", "key_dim", "value_dim", "groups")
    if self.heads % self.groups:
      raise ValueError(f"groups={self.groups} must divide heads={self.heads}")
    if self.convolution_width < 0 or self.convolution_width == 1:
      raise ValueError(
        f"convolution_width={self.convolution_width} must be 0 or at least 2"
      )

  def state_floats(self, length: int) -> int:
    """Floats of the memory for any length, for one layer."""
    del length
    return self.heads * self.key_dim * self.value_dim

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, for one layer.

    Multiply-adds count two: the write and the read.
    """
    del length
    return 4 * self.heads * self.key_dim * self.value_dim


class Mamba2State(NamedTuple):
  """State of the mixer: convolution taps (or None) and the memory."""

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  memory: state_space_duality.State


class Mamba2(nnx.Module):
  """The Mamba2 mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: Mamba2Config,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    heads, groups = config.heads, config.groups
    key_width, value_width = groups * config.key_dim, heads * config.value_dim

    def project(width, name="heads"):
      return linear.Linear(d_model, width, ("embed", name), std=std, rngs=rngs)

    def convolution(width):
      return short_convolution.make(
        width, config.convolution_width, init="uniform", rngs=rngs
      )

    # Groups may be fewer than what heads are sharded into.
    self.query, self.key = (project(key_width, "key_dim") for _ in range(2))
    self.value, self.gate = project(value_width), project(value_width)
    self.step_logit = project(heads)
    self.step_size = step_size.StepSize(heads, **_DECAY_RATES, rngs=rngs)
    self.skip = linear.constant_param(jnp.ones(heads), ("heads",))
    self.query_convolution = convolution(key_width)
    self.key_convolution = convolution(key_width)
    self.value_convolution = convolution(value_width)
    self.norm = norm.RMSNorm(
      value_width, name="heads", eps=_NORM_EPS, groups=groups
    )
    self.out = linear.Linear(
      value_width, d_model, ("heads", "embed"), std=out_std, rngs=rngs
    )
    self.spec = config.spec()
    self.heads, self.groups = heads, groups
    self.key_dim, self.value_dim = config.key_dim, config.value_dim

  def init_state(self, batch: int, length: int | None = None) -> Mamba2State:
    """The state before the first token: a memory of zeros."""
    del length
    return Mamba2State(
      short_convolution.init_taps(self.query_convolution, batch),
      short_convolution.init_taps(self.key_convolution, batch),
      short_convolution.init_taps(self.value_convolution, batch),
      self._memory(batch),
    )

  def _memory(self, batch):
    return state_space_duality.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
    )

  def memories(self, state: Mamba2State) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return (state.memory.memory,)

  def _inputs(self, x, state: Mamba2State, segment_ids):
    """Projects `[batch, time, d_model]` to the memory's inputs and taps."""

    def convolved(projection, convolution, taps):
      y, taps = short_convolution.apply(
        convolution,
        projection(x),
        taps,
        segment_ids=segment_ids,
        segment_id=state.memory.segment_id,
      )
      return jax.nn.silu(y), taps

    query, query_taps = convolved(
      self.query, self.query_convolution, state.query_taps
    )
    key, key_taps = convolved(self.key, self.key_convolution, state.key_taps)
    value, value_taps = convolved(
      self.value, self.value_convolution, state.value_taps
    )
    step, log_decay = self.step_size(self.step_logit(x))
    skip = jnp.broadcast_to(self.skip[...], step.shape)
    value, log_decay, step, skip = (
      linear.split_heads(y, self.heads) for y in (value, log_decay, step, skip)
    )
    # Not constrained to shards of heads: there may be fewer groups.
    query, key = (
      y.reshape(*y.shape[:-1], self.groups, -1) for y in (query, key)
    )
    inputs = state_space_duality.Inputs(
      query, key, value, log_decay, step, skip
    )
    return inputs, (query_taps, key_taps, value_taps)

  def _on_mesh(self, inputs: state_space_duality.Inputs):
    """Inputs and Spec whose groups can be laid over the mesh with the heads."""
    if self.groups % sharding.head_shards() == 0:
      return inputs, self.spec
    query, key = (
      jnp.repeat(y, self.spec.heads_per_group, axis=2)
      for y in (inputs.query, inputs.key)
    )
    spec = dataclasses.replace(self.spec, heads_per_group=1)
    return inputs._replace(query=query, key=key), spec

  def _output(self, x: jax.Array, y: jax.Array) -> jax.Array:
    y = y.reshape(*x.shape[:-1], -1) * jax.nn.silu(self.gate(x))
    return self.out(self.norm(y))

  def __call__(
    self, x: jax.Array, state: Mamba2State, context: mixer.Context
  ) -> tuple[jax.Array, Mamba2State]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    segment_ids = context.segment_ids
    inputs, taps = self._inputs(x, state, segment_ids)
    inputs, spec = self._on_mesh(inputs)
    chunk = sharding.on_mesh(
      state_space_duality.chunk, over_time=hand_off.linear
    )
    memory, y = chunk(
      state.memory,
      inputs,
      spec=spec,
      segment_ids=segment_ids,
      reset_state=None if segment_ids is None else self._memory(x.shape[0]),
    )
    return self._output(x, y), Mamba2State(*taps, memory)

  def step(
    self, x: jax.Array, state: Mamba2State, context: mixer.Context
  ) -> tuple[jax.Array, Mamba2State]:
    """Mixes one token: `[batch, d_model]` in constant time."""
    del context
    inputs, taps = self._inputs(x[:, None], state, None)
    memory, y = state_space_duality.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    return self._output(x, y), Mamba2State(*taps, memory)
