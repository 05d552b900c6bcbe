"""The Trellis mixer: projections, convolutions and gates around the memory.

x -> W_qk -> two short convolutions -> q, k;  W_v -> v;  W_alpha -> alpha;
decay and rate gates -> Trellis -> layer norm -> * GELU(x W_g) -> W_o
(arXiv 2512.23852, figure 1; docs/trellis.md explains what the paper leaves
open).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import (
  base,
  bounded_rate,
  linear,
  norm,
  options,
  parameters,
  solved,
)
from memcomp_kernels import trellis
from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.options import not_negative, option

_NO_EPS = ("silu", "softmax", "identity")


@options.config_class
class TrellisConfig(solved.SolvedConfig):
  """Options of Trellis.

  Attributes:
    separate_gates: whether each pass has its own decay and rate.
    write_rate_scale: maximum write rate. Stable updates need rate * |written|^2
      * |J_phi|^2 < 2.
    rate_bound: upper bound of rate * |written|^2 * |J_phi|^2 for each pass, see
      `bounded_rate`; 0 is off.
    learn_phi_eps: whether phi_eps is learned, one per head; `phi_eps` is then
      its initial value.
    learned_memory: whether the initial memory is learned; else it is zero.
    memory_std: initial standard deviation of the learned initial memory.
    convolve_value: whether v has a convolution too (the paper: q and k only).
    head_norm: whether an RMS norm of each head follows the memory, as in Gated
      DeltaNet, in place of the paper's layer norm over all heads.
  """

  op = trellis

  normalize: str = "qkv"
  write_rate_init: float = 0.03
  separate_gates: bool = False
  rate_bound: float = option(0.0, not_negative)
  learn_phi_eps: bool = False
  learned_memory: bool = True
  memory_std: float = 0.5
  head_norm: bool = False

  def tiling(self) -> trellis.Tiling:
    """The op's tiling, with the solver of the per-token gradients."""
    solver = self.solver
    tiling = trellis.Tiling()
    if solver.method != "auto":
      method = solver_lib.Solver(
        method=solver.method, tolerance=solver.tolerance
      )
      tiling = dataclasses.replace(tiling, solver=method)
    if solver.tile_time:
      tiling = dataclasses.replace(tiling, tile_time=solver.tile_time)
    return tiling

  def check(self) -> None:
    """Raises ValueError if fields contradict each other."""
    solved.SolvedConfig.check(self)
    spec = self.spec()
    if self.learn_phi_eps and spec.phi in _NO_EPS:
      raise ValueError(
        f"learn_phi_eps=True: phi={spec.phi!r} has no eps; choose a phi with a"
        " norm, or learn_phi_eps=False"
      )
    steep = spec.phi not in _NO_EPS and spec.phi_eps < 1e-3
    if steep and not self.learned_memory:
      raise ValueError(
        f"learned_memory=False with phi={spec.phi!r} has a gradient of"
        f" 1 / sqrt(phi_eps={spec.phi_eps}) at the zero memory; raise"
        " phi_eps or learn the memory"
      )


class Trellis(solved.SolvedMixer):
  """Trellis: projections, convolutions and gates around the memory."""

  Config = TrellisConfig
  memory_fields = ("key_memory", "value_memory")

  def build(self, config: TrellisConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    heads, slots = self.heads, self.spec.num_slots
    keys, values = heads * self.key_dim, heads * self.value_dim
    passes = 2 if config.separate_gates else 1
    self.query_key = make.project(keys)
    self.value = make.project(values)
    self.target = make.project(heads * slots)
    self.gate = make.project(values)
    self.build_gates(config, make, heads * passes)
    self.out = make.out(values)
    self.post_norm = (
      norm.RMSNorm(values, name="heads", groups=heads)
      if config.head_norm
      else norm.LayerNorm(values, name="heads")
    )
    self.log_phi_eps = nnx.data(None)
    if config.learn_phi_eps:
      start = jnp.full(heads, math.log(self.spec.phi_eps))
      self.log_phi_eps = linear.constant_param(start, ("heads",))
    self.build_convolutions(config, make, keys)

    def memory(dim, name):
      if not config.learned_memory:
        return nnx.data(None)
      return linear.normal_param(
        make.rngs,
        (heads, slots, dim),
        ("heads", "slots", name),
        std=config.memory_std,
        weight_decay=False,
      )

    self.key_memory = memory(self.key_dim, "key_dim")
    self.value_memory = memory(self.value_dim, "value_dim")
    self.rate_bound = config.rate_bound

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> solved.SolvedState:
    """The state before the first token, with the learned memory."""
    del length

    def value(parameter):
      return None if parameter is None else parameter[...]

    memory = self.init_memory(
      batch,
      key_memory=value(self.key_memory),
      value_memory=value(self.value_memory),
    )
    return self.with_taps(batch, memory)

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    query, key, value, state = self.query_key_value(x, state, call)
    log_decay, write_rate = self.gates(x)
    log_eps = None
    if self.log_phi_eps is not None:
      log_eps = base.wide(self.log_phi_eps[...])[:, None]
      log_eps = jnp.broadcast_to(log_eps, (*key.shape[:-1], 1))
    inputs = trellis.Inputs(
      query=query,
      key=key,
      value=value,
      target=self.split(self.target(x)),
      log_decay=log_decay,
      write_rate=write_rate,
      log_phi_eps=log_eps,
    )
    if self.rate_bound:
      inputs = bounded_rate.bound(inputs, self.spec, self.rate_bound)
    return inputs, state

  def outputs(self, x, y):
    """Applies norm, gate and output projection."""
    y = linear.join_heads(y)
    return self.out(self.post_norm(y) * jax.nn.gelu(self.gate(x)))
