"""The mixers DeltaNet and Gated DeltaNet around the delta rule.

x -> W_q, W_k, W_v -> short convolutions -> SiLU -> q, k, v; q, k to length 1;
write rate sigmoid(x W_b), decay -> delta rule -> RMS norm of each head
(* SiLU(x W_g)) -> W_o (arXiv 2406.06484, 2412.06464; docs/delta_rule.md).
"""

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
  step_size,
)
from memcomp_kernels import delta_rule
from memcomp_kernels.math import activations
from memcomp_kernels.options import option, positive

# Initial decay rates exp(A_log) are drawn from U(0, 16), with a finite log.
_DECAY_RATES = {"smallest_rate": 1e-3, "largest_rate": 16.0}


@options.config_class
class GatedDeltaNetConfig(options.MixerConfig):
  """Options of Gated DeltaNet; `DeltaNetConfig` has other defaults.

  By default, six heads; keys have 3/4 of the width and values 3/2.

  Attributes:
    output_gate: whether the normalized output is multiplied by SiLU(x W_g).
    negative_eigenvalues: whether write rates are in (0, 2) instead of (0, 1)
      (arXiv 2411.12537).
    convolution_width: taps of short convolutions on q, k and v; 0 for none.
    norm_eps: added to the mean square by the norm of each head.
  """

  op = delta_rule
  left_out = ("scale",)

  output_gate: bool = True
  negative_eigenvalues: bool = False
  convolution_width: int = option(4, options.taps)
  norm_eps: float = option(1e-5, positive)

  def widths(self, d_model: int) -> tuple[int, int, int]:
    """Sizes for six heads, with keys of 3/4 and values of 3/2 of the width."""
    keys = max(1, round(0.75 * d_model))
    return 6, keys, 2 * keys


@options.config_class
class DeltaNetConfig(GatedDeltaNetConfig):
  """Options of DeltaNet: those of `GatedDeltaNetConfig` without gates.

  By default, heads of 128 keys and values.
  """

  forget_gate: bool = False
  output_gate: bool = False

  def widths(self, d_model: int) -> tuple[int, int, int]:
    """Sizes for heads of 128, with keys and values of the width."""
    return max(1, d_model // 128), d_model, d_model


class GatedDeltaNet(convolved.ConvolvedMixer):
  """Gated DeltaNet; `DeltaNet` has other defaults."""

  Config = GatedDeltaNetConfig

  def build(self, config: GatedDeltaNetConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    keys, values = self.heads * self.key_dim, self.heads * self.value_dim
    self.query, self.key = make.project(keys), make.project(keys)
    self.value = make.project(values)
    self.write_rate = make.project(self.heads)
    self.decay_step, self.decay = nnx.data(None), nnx.data(None)
    if self.spec.forget_gate:
      self.decay_step = make.project(self.heads)
      self.decay = step_size.StepSize(
        self.heads, **_DECAY_RATES, rngs=make.rngs
      )
    self.gate = nnx.data(None)
    if config.output_gate:
      self.gate = make.project(values)

    def convolution(width):
      return make.convolution(
        width, config.convolution_width, init="uniform", bias=False
      )

    self.query_convolution = convolution(keys)
    self.key_convolution = convolution(keys)
    self.value_convolution = convolution(values)
    self.norm = norm.RMSNorm(
      self.value_dim, name="value_dim", eps=config.norm_eps
    )
    self.out = make.out(values)
    self.largest_rate = 2.0 if config.negative_eigenvalues else 1.0

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    projected, state = self.convolved(
      state, call, self.query(x), self.key(x), self.value(x)
    )
    query, key, value = (self.split(jax.nn.silu(y)) for y in projected)
    rate = jax.nn.sigmoid(base.wide(self.write_rate(x)))
    log_decay = jnp.zeros_like(rate)
    if self.decay is not None and self.decay_step is not None:
      _, log_decay = self.decay(self.decay_step(x))
    inputs = delta_rule.Inputs(
      query=activations.unit(query),
      key=activations.unit(key),
      value=value,
      log_decay=self.split(log_decay),
      write_rate=self.split(self.largest_rate * rate),
    )
    return inputs, state

  def outputs(self, x, y):
    """Applies the norm of each head, the gate and the output projection."""
    y = linear.join_heads(self.norm(y))
    if self.gate is not None:
      y = y * jax.nn.silu(self.gate(x))
    return self.out(y)


class DeltaNet(GatedDeltaNet):
  """DeltaNet without decay and output gate."""

  Config = DeltaNetConfig
