"""The mixers DeltaNet and Gated DeltaNet around the delta rule.

x -> W_q, W_k, W_v -> short convolutions -> SiLU -> q, k, v; q, k to length 1;
write rate sigmoid(x W_b), decay -> delta rule -> RMS norm of each head
(* SiLU(x W_g)) -> W_o (arXiv 2406.06484, 2412.06464; docs/delta_rule.md).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, norm, short_convolution, step_size
from memcomp_kernels import hand_off
from memcomp_kernels.delta_rule import api as delta_rule
from memcomp_kernels.primitives import activations

# Decay rates exp(A_log) at the start are drawn from U(0, 16), whose log is kept
# finite.
_DECAY_RATES = {"smallest_rate": 1e-3, "largest_rate": 16.0}
_NORM_EPS = 1e-5


@dataclasses.dataclass(kw_only=True, slots=True)
class GatedDeltaNetConfig(mixer.MixerConfig):
  """A Gated DeltaNet mixer; `DeltaNetConfig` has other defaults.

  Attributes:
    heads: memories side by side.
    key_dim: features of a head's query and key.
    value_dim: features of a head's value.
    forget_gate: whether memories decay, by a number for each token and head.
    output_gate: whether the normalised output is multiplied by SiLU(x W_g).
    negative_eigenvalues: write rates in (0, 2) rather than (0, 1) (arXiv
      2411.12537).
    convolution_width: taps of short convolutions on q, k and v; 0 for none.
  """

  heads: int = 6
  key_dim: int = 256
  value_dim: int = 512
  forget_gate: bool = True
  output_gate: bool = True
  negative_eigenvalues: bool = False
  convolution_width: int = 4

  def spec(self) -> delta_rule.Spec:
    """The memory's meaning."""
    return delta_rule.Spec(forget_gate=self.forget_gate)

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    mixer.require_positive(self, "heads", "key_dim", "value_dim")
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

    Multiply-adds count two: what is predicted, the write, the read.
    """
    del length
    return 6 * self.heads * self.key_dim * self.value_dim


@dataclasses.dataclass(kw_only=True, slots=True)
class DeltaNetConfig(GatedDeltaNetConfig):
  """A DeltaNet mixer: as `GatedDeltaNetConfig`, with no gates."""

  heads: int = 8
  key_dim: int = 128
  value_dim: int = 128
  forget_gate: bool = False
  output_gate: bool = False


class DeltaNetState(NamedTuple):
  """State of the mixer: convolution taps (or None) and the memory."""

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  memory: delta_rule.State


class DeltaNet(nnx.Module):
  """The DeltaNet mixer, with the gates that its configuration asks for.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: GatedDeltaNetConfig,
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

    def convolution(width):
      return short_convolution.make(
        width, config.convolution_width, init="uniform", bias=False, rngs=rngs
      )

    self.query, self.key = project(key_width), project(key_width)
    self.value = project(value_width)
    self.write_rate = project(heads)
    self.decay_step, self.decay = nnx.data(None), nnx.data(None)
    if config.forget_gate:
      self.decay_step = project(heads)
      self.decay = step_size.StepSize(heads, **_DECAY_RATES, rngs=rngs)
    self.gate = nnx.data(None)
    if config.output_gate:
      self.gate = project(value_width)
    self.query_convolution = convolution(key_width)
    self.key_convolution = convolution(key_width)
    self.value_convolution = convolution(value_width)
    self.norm = norm.RMSNorm(config.value_dim, name="value_dim", eps=_NORM_EPS)
    self.out = linear.Linear(
      value_width, d_model, ("heads", "embed"), std=out_std, rngs=rngs
    )
    self.spec = config.spec()
    self.heads = heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim
    self.largest_rate = 2.0 if config.negative_eigenvalues else 1.0

  def init_state(self, batch: int, length: int | None = None) -> DeltaNetState:
    """The state before the first token: a memory of zeros."""
    del length
    return DeltaNetState(
      short_convolution.init_taps(self.query_convolution, batch),
      short_convolution.init_taps(self.key_convolution, batch),
      short_convolution.init_taps(self.value_convolution, batch),
      self._memory(batch),
    )

  def _memory(self, batch):
    return delta_rule.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
    )

  def memories(self, state: DeltaNetState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return (state.memory.memory,)

  def _inputs(self, x, state: DeltaNetState, segment_ids):
    """Projects `[batch, time, d_model]` to the memory's inputs and taps."""

    def convolved(projection, convolution, taps):
      y, taps = short_convolution.apply(
        convolution,
        projection(x),
        taps,
        segment_ids=segment_ids,
        segment_id=state.memory.segment_id,
      )
      return linear.split_heads(jax.nn.silu(y), self.heads), taps

    query, query_taps = convolved(
      self.query, self.query_convolution, state.query_taps
    )
    key, key_taps = convolved(self.key, self.key_convolution, state.key_taps)
    value, value_taps = convolved(
      self.value, self.value_convolution, state.value_taps
    )
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rate = jax.nn.sigmoid(self.write_rate(x).astype(wide))
    log_decay = jnp.zeros_like(rate)
    if self.decay is not None and self.decay_step is not None:
      _, log_decay = self.decay(self.decay_step(x))
    split = functools.partial(linear.split_heads, heads=self.heads)
    inputs = delta_rule.Inputs(
      query=activations.unit(query),
      key=activations.unit(key),
      value=value,
      log_decay=split(log_decay),
      write_rate=split(self.largest_rate * rate),
    )
    return inputs, (query_taps, key_taps, value_taps)

  def _output(self, x: jax.Array, y: jax.Array) -> jax.Array:
    y = self.norm(y).reshape(*x.shape[:-1], -1)
    if self.gate is not None:
      y = y * jax.nn.silu(self.gate(x))
    return self.out(y)

  def __call__(
    self, x: jax.Array, state: DeltaNetState, context: mixer.Context
  ) -> tuple[jax.Array, DeltaNetState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    segment_ids = context.segment_ids
    inputs, taps = self._inputs(x, state, segment_ids)
    chunk = sharding.on_mesh(delta_rule.chunk, over_time=hand_off.linear)
    memory, y = chunk(
      state.memory,
      inputs,
      spec=self.spec,
      segment_ids=segment_ids,
      reset_state=None if segment_ids is None else self._memory(x.shape[0]),
    )
    return self._output(x, y), DeltaNetState(*taps, memory)

  def step(
    self, x: jax.Array, state: DeltaNetState, context: mixer.Context
  ) -> tuple[jax.Array, DeltaNetState]:
    """Mixes one token: `[batch, d_model]` in constant time."""
    del context
    inputs, taps = self._inputs(x[:, None], state, None)
    memory, y = delta_rule.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    return self._output(x, y), DeltaNetState(*taps, memory)
