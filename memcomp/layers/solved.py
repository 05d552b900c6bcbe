"""What the layers of Trellis and Lattice share.

Both have convolutions on projections of x, gates for decay and write rate, and
a solver for per-token gradients.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from memcomp.layers import base, convolved, linear, options, parameters
from memcomp_kernels.math import activations
from memcomp_kernels.options import inside, one_of, option

NORMALIZE = ("none", "qk", "qkv")
"""Vectors that may have an L2 normalization before the memory."""


@options.config_class
class SolvedConfig(options.MixerConfig):
  """Options that both layers have.

  Attributes:
    normalize: vectors with L2 normalization: "none", "qk" or "qkv".
    decay_init: initial decay factor, in (0, 1).
    write_rate_init: initial write rate, in (0, write_rate_scale).
    write_rate_scale: maximum write rate.
    convolution_width: taps of the short convolutions; 0 for none.
    convolve_value: whether v has a convolution too.
    solver: how per-token gradients are solved, a `SolverConfig`; in a config
      its fields are set, such as `solver.method=sweeps`.
  """

  normalize: str = option("qk", one_of(NORMALIZE))
  decay_init: float = option(0.982, inside(0, 1))
  write_rate_init: float = 0.3
  write_rate_scale: float = 1.0
  convolution_width: int = option(4, options.taps)
  convolve_value: bool = False

  solver: options.SolverConfig = dataclasses.field(
    default_factory=options.SolverConfig
  )

  def check(self) -> None:
    """Raises ValueError if fields contradict each other."""
    if not isinstance(self.solver, options.SolverConfig):
      raise ValueError(
        f"solver={self.solver!r} must be a SolverConfig, such as"
        ' SolverConfig(method="sweeps")'
      )
    self.solver.validate()
    options.check_write_rate(self)


class SolvedState(NamedTuple):
  """State of the mixer: convolution taps (or None) and the memory."""

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  memory: Any


class SolvedMixer(convolved.ConvolvedMixer):
  """A mixer whose per-token gradients need a solver."""

  query_key: linear.Linear
  value: linear.Linear
  log_decay: linear.Linear
  write_rate: linear.Linear

  def build_gates(self, config: Any, make: parameters.Make, count: int) -> None:
    """Makes the projections of `count` decays and write rates."""
    self.log_decay = make.project(count, linear.logit(config.decay_init))
    rate = config.write_rate_init / config.write_rate_scale
    self.write_rate = make.project(count, linear.logit(rate))
    self.write_rate_scale = config.write_rate_scale

  def build_convolutions(
    self, config: Any, make: parameters.Make, key_width: int
  ) -> None:
    """Makes the convolutions, and keeps the options that all calls share."""
    width = config.convolution_width
    self.query_convolution = make.convolution(key_width, width)
    self.key_convolution = make.convolution(key_width, width)
    self.value_convolution = make.convolution(
      self.heads * self.value_dim, width if config.convolve_value else 0
    )
    self.normalize = config.normalize
    self.tiling = config.tiling()
    self.has_stats = config.solver.has_stats(config.gradient_at)

  def with_taps(self, batch: int, memory: Any) -> SolvedState:
    """The state before the first token, with the given memory."""
    return SolvedState(**self.fresh_taps(batch), memory=memory)

  def options_of_chunk(self, inputs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Passes the tiling to the op."""
    return inputs, self.spec, {"tiling": self.tiling}

  def query_key_value(
    self, x: jax.Array, state: SolvedState, call: base.Call
  ) -> tuple[jax.Array, jax.Array, jax.Array, SolvedState]:
    """Returns query, key, value `[batch, time, heads, dim]`, and the state."""
    shared = self.query_key(x)
    projected, state = self.convolved(
      state, call, shared, shared, self.value(x)
    )
    query, key, value = map(self.split, projected)
    if self.normalize != "none":
      query, key = activations.unit(query), activations.unit(key)
    if self.normalize == "qkv":
      value = activations.unit(value)
    return query, key, value, state

  def gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log decay and write rate, float32 or wider."""
    log_decay, rate = map(self.split, (self.log_decay(x), self.write_rate(x)))
    return (
      jax.nn.log_sigmoid(base.wide(log_decay)),
      self.write_rate_scale * jax.nn.sigmoid(base.wide(rate)),
    )
