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

from memcomp.layers import base, bounded_rate, linear, norm, options, solved
from memcomp_kernels import trellis
from memcomp_kernels.math import solver as solver_lib

option = options.option
_NO_EPS = ("silu", "softmax", "identity")
_SPEC = trellis.Spec()


@dataclasses.dataclass(kw_only=True, slots=True)
class TrellisConfig(options.MixerConfig):
  """Options of Trellis.

  Fields from `num_slots` to `first_order` belong to
  `memcomp_kernels.trellis.reference.Spec`.

  Attributes:
    num_slots: slots per head.
    phi: activation in the memory's loss.
    phi_eps: epsilon of phi's norm; the initial value if it is learned.
    read_activation: f, between the two reads.
    read_eps: epsilon of f's norm.
    gradient_at: "chunk_start" or "token".
    chunk_size: tokens that share a chunk-start gradient.
    forget_gate: whether memories decay.
    value_readout_phi: whether phi is applied to the second read.
    first_order: whether to stop gradients through the inner step.
    normalize: vectors with L2 normalization: "none", "qk" or "qkv".
    separate_gates: whether each pass has its own decay and rate.
    decay_init: initial decay factor, in (0, 1).
    write_rate_init: initial write rate, in (0, write_rate_scale).
    write_rate_scale: maximum write rate. Stable updates need rate * |written|^2
      * |J_phi|^2 < 2.
    rate_bound: upper bound of rate * |written|^2 * |J_phi|^2 for each pass, see
      `bounded_rate`; 0 is off.
    learn_phi_eps: whether phi_eps is learned, one per head.
    learned_memory: whether the initial memory is learned; else it is zero.
    memory_std: initial standard deviation of the learned initial memory.
    convolution_width: taps of the short convolutions; 0 for none.
    convolve_value: whether v has a convolution too (the paper: q and k only).
    solver: solver of the per-token gradients.
  """

  Spec = trellis.Spec

  num_slots: int = _SPEC.num_slots
  phi: str = _SPEC.phi
  phi_eps: float = _SPEC.phi_eps
  read_activation: str = _SPEC.read_activation
  read_eps: float = _SPEC.read_eps
  gradient_at: str = _SPEC.gradient_at
  chunk_size: int = _SPEC.chunk_size
  forget_gate: bool = _SPEC.forget_gate
  value_readout_phi: bool = _SPEC.value_readout_phi
  first_order: bool = _SPEC.first_order
  normalize: str = option("qkv", options.one_of(solved.NORMALIZE))
  separate_gates: bool = False
  decay_init: float = option(0.982, options.inside(0, 1))
  write_rate_init: float = 0.03
  write_rate_scale: float = 1.0
  rate_bound: float = option(0.0, options.not_negative)
  learn_phi_eps: bool = False
  learned_memory: bool = True
  memory_std: float = 0.5
  convolution_width: int = option(4, options.taps)
  convolve_value: bool = False

  solver: options.SolverConfig = dataclasses.field(
    default_factory=options.SolverConfig
  )

  def tiling(self) -> trellis.Tiling:
    """The kernel's tiling, with the solver of the per-token gradients."""
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
    self.solver.validate()
    options.check_write_rate(self)
    if self.learn_phi_eps and self.phi in _NO_EPS:
      raise ValueError(
        f"learn_phi_eps=True: phi={self.phi!r} has no eps; choose a phi with a"
        " norm, or learn_phi_eps=False"
      )
    steep = self.phi not in _NO_EPS and self.phi_eps < 1e-3
    if steep and not self.learned_memory:
      raise ValueError(
        f"learned_memory=False with phi={self.phi!r} has a gradient of"
        f" 1 / sqrt(phi_eps={self.phi_eps}) at the zero memory; raise"
        " phi_eps or learn the memory"
      )

  def state_floats(self, length: int) -> int:
    """Floats of the memory per sequence of any length, per layer."""
    del length
    return self.heads * self.num_slots * (self.key_dim + self.value_dim)

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token and layer.

    A multiply-add counts as two. Includes both passes' z, write and read, token
    by token.
    """
    del length
    per_head = 6 * self.num_slots * (self.key_dim + self.value_dim)
    if self.spec().stale:
      # Within a chunk, reads use two score matrices per pass.
      dims = self.key_dim + self.value_dim + 2 * self.num_slots
      per_head += 2 * self.chunk_size * dims
    return self.heads * per_head


class Trellis(solved.SolvedMixer):
  """Trellis: projections, convolutions and gates around the memory."""

  Config = TrellisConfig
  op = trellis
  memory_fields = ("key_memory", "value_memory")

  def build(self, config: TrellisConfig, make: base.Make) -> None:
    """Makes the parameters."""
    heads, slots = self.heads, config.num_slots
    keys, values = heads * self.key_dim, heads * self.value_dim
    passes = 2 if config.separate_gates else 1
    self.query_key = make.project(keys)
    self.value = make.project(values)
    self.target = make.project(heads * slots)
    self.gate = make.project(values)
    self.build_gates(config, make, heads * passes)
    self.out = make.out(values)
    self.post_norm = norm.LayerNorm(values, name="heads")
    self.log_phi_eps = nnx.data(None)
    if config.learn_phi_eps:
      start = jnp.full(heads, math.log(config.phi_eps))
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
    """Applies layer norm, gate and output projection."""
    y = linear.join_heads(y)
    return self.out(self.post_norm(y) * jax.nn.gelu(self.gate(x)))
