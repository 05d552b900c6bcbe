"""The Mamba2 mixer around state space duality (arXiv 2405.21060, section 7).

x -> z, (x, B, C), dt -> a short convolution of x, B, C -> SiLU -> state space
duality with dt = softplus(dt + dt_bias), A = -exp(A_log), plus D x -> RMS norm
of y * SiLU(z) -> W_o (docs/state_space_duality.md).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from memcomp.layers import (
  convolved,
  linear,
  norm,
  options,
  parameters,
  step_size,
)
from memcomp_kernels import state_space_duality
from memcomp_kernels.options import at_least, option

# Initial exp(A_log) is drawn from U(1, 16).
_DECAY_RATES = {"smallest_rate": 1.0, "largest_rate": 16.0}
_NORM_EPS = 1e-5


@options.config_class
class Mamba2Config(options.MixerConfig):
  """Options of Mamba2.

  By default, heads of 64 features, twice the width in total, and a state of
  128.

  Attributes:
    key_dim: features of B and C, the state size.
    value_dim: features of x per head.
    groups: number of groups of heads that share B and C, and of parts of the
      output norm; divides `heads`.
    convolution_width: taps of the short convolution on x, B and C; 0 for none.
  """

  op = state_space_duality
  left_out = ("heads_per_group", "skip")

  key_dim: int = option(128, at_least(1))
  groups: int = option(1, at_least(1))
  convolution_width: int = option(4, options.taps)

  def widths(self, d_model: int) -> tuple[int, int, int]:
    """Sizes for heads of 64 features, twice the width in total."""
    return max(1, 2 * d_model // 64), self.key_dim, 2 * d_model

  def derived(self) -> dict[str, Any]:
    """The heads that share B and C."""
    return {"heads_per_group": max(1, self.heads // self.groups)}

  def check(self) -> None:
    """Raises ValueError if the groups do not divide the heads."""
    if self.heads and self.heads % self.groups:
      raise ValueError(f"groups={self.groups} must divide heads={self.heads}")


class Mamba2(convolved.ConvolvedMixer):
  """Mamba2: projections, convolutions and gates around the memory."""

  Config = Mamba2Config

  def build(self, config: Mamba2Config, make: parameters.Make) -> None:
    """Makes the parameters."""
    heads, groups = self.heads, config.groups
    keys, values = groups * self.key_dim, heads * self.value_dim
    # There may be fewer groups than shards of heads.
    self.query = make.project(keys, name="key_dim")
    self.key = make.project(keys, name="key_dim")
    self.value, self.gate = make.project(values), make.project(values)
    self.step_logit = make.project(heads)
    self.step_size = step_size.StepSize(heads, **_DECAY_RATES, rngs=make.rngs)
    self.skip = linear.constant_param(jnp.ones(heads), ("heads",))
    width = config.convolution_width
    self.query_convolution = make.convolution(keys, width, init="uniform")
    self.key_convolution = make.convolution(keys, width, init="uniform")
    self.value_convolution = make.convolution(values, width, init="uniform")
    self.norm = norm.RMSNorm(values, name="heads", eps=_NORM_EPS, groups=groups)
    self.out = make.out(values)
    self.groups = groups

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    projected, state = self.convolved(
      state, call, self.query(x), self.key(x), self.value(x)
    )
    query, key, value = map(jax.nn.silu, projected)
    step, log_decay = self.step_size(self.step_logit(x))
    skip = jnp.broadcast_to(self.skip[...], step.shape)
    value, log_decay, step, skip = map(
      self.split, (value, log_decay, step, skip)
    )
    # Not sharded by heads, because there may be fewer groups.
    query, key = (
      y.reshape(*y.shape[:-1], self.groups, y.shape[-1] // self.groups)
      for y in (query, key)
    )
    inputs = state_space_duality.Inputs(
      query, key, value, log_decay, step, skip
    )
    return inputs, state

  def options_of_chunk(self, inputs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Repeats groups if they cannot be sharded like the heads."""
    if self.groups % self.rules.shards("heads") == 0:
      return inputs, self.spec, {}
    query, key = (
      jnp.repeat(y, self.spec.heads_per_group, axis=2)
      for y in (inputs.query, inputs.key)
    )
    spec = dataclasses.replace(self.spec, heads_per_group=1)
    return inputs._replace(query=query, key=key), spec, {}

  def outputs(self, x, y):
    """Applies gate, norm and output projection."""
    y = linear.join_heads(y) * jax.nn.silu(self.gate(x))
    return self.out(self.norm(y))
