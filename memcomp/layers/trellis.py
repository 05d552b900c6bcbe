"""The Trellis mixer: projections, convolutions and gates around the memory.

x -> W_qk -> two short convolutions -> q, k;  W_v -> v;  W_alpha -> alpha;
decay and rate gates -> Trellis -> layer norm -> * GELU(x W_g) -> W_o
(arXiv 2512.23852, figure 1; what it leaves open is in docs/trellis.md).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import (
  bounded_rate,
  linear,
  mixer,
  norm,
  short_convolution,
)
from memcomp_kernels.primitives import activations, triangular
from memcomp_kernels.trellis import api as trellis

NORMALIZE = ("none", "qk", "qkv")
_NO_EPS = ("silu", "softmax", "identity")


@dataclasses.dataclass(kw_only=True, slots=True)
class TrellisConfig(mixer.MixerConfig):
  """A Trellis mixer; the first fields are those of the kernel's `Spec`.

  Attributes:
    num_slots: see `memcomp_kernels.trellis.types.Spec`, as all down to
      `first_order`.
    phi: the activation in the memory's loss.
    phi_eps: inside phi's norm; the start of a learned one.
    read_activation: f, between the two reads.
    read_eps: inside f's norm.
    gradient_at: "chunk_start" or "token".
    chunk_size: tokens that share a chunk-start gradient.
    forget_gate: whether memories decay.
    value_readout_phi: phi on the second read.
    first_order: no gradient through the inner step.
    heads: memories side by side.
    key_dim: features of a head's query and key.
    value_dim: features of a head's value.
    normalize: L2-norm of "none", "qk" or "qkv" before the memory.
    separate_gates: decay and rate of each pass on their own.
    decay_init: decay factor at the start, in (0, 1).
    write_rate_init: write rate at the start, in (0, write_rate_scale).
    write_rate_scale: the largest write rate. Stable updates need
      rate * |written|^2 * |J_phi|^2 < 2.
    rate_bound: of rate * |written|^2 * |J_phi|^2, in each pass on its own,
      see `bounded_rate`; 0 is off.
    learn_phi_eps: whether phi_eps is learned, one for each head.
    learned_memory: whether the initial memory is learned; else it is zero.
    memory_std: of the learned initial memory at the start.
    convolution_width: taps of the short convolutions; 0 for none.
    convolve_value: a convolution on v too (the paper has q and k only).
    solver: how gradients per token are evaluated.
  """

  num_slots: int = 64
  phi: str = "ln_silu"
  phi_eps: float = 1.0
  read_activation: str = "ln_silu"
  read_eps: float = 1e-6
  gradient_at: str = "chunk_start"
  chunk_size: int = 16
  forget_gate: bool = True
  value_readout_phi: bool = False
  first_order: bool = False
  heads: int = 12
  key_dim: int = 64
  value_dim: int = 64
  normalize: str = "qkv"
  separate_gates: bool = False
  decay_init: float = 0.982
  write_rate_init: float = 0.03
  write_rate_scale: float = 1.0
  rate_bound: float = 0.0
  learn_phi_eps: bool = False
  learned_memory: bool = True
  memory_std: float = 0.5
  convolution_width: int = 4
  convolve_value: bool = False

  solver: mixer.SolverConfig = dataclasses.field(
    default_factory=mixer.SolverConfig
  )

  def spec(self) -> trellis.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    names = [field.name for field in dataclasses.fields(trellis.Spec)]
    return trellis.Spec(**{name: getattr(self, name) for name in names})

  def tiling(self) -> trellis.Tiling:
    """How gradients per token are evaluated."""
    solver = self.solver
    tiling = trellis.Tiling()
    if solver.method != "auto":
      method = triangular.Solver(
        method=solver.method, tolerance=solver.tolerance
      )
      tiling = dataclasses.replace(tiling, solver=method)
    if solver.tile_time:
      tiling = dataclasses.replace(tiling, tile_time=solver.tile_time)
    return tiling

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.spec()
    self.solver.validate()
    if self.normalize not in NORMALIZE:
      raise ValueError(
        f"normalize={self.normalize!r} is not one of: {', '.join(NORMALIZE)}"
      )
    mixer.require_positive(self, "heads", "key_dim", "value_dim")
    if not 0 < self.decay_init < 1:
      raise ValueError(f"decay_init={self.decay_init} must be in (0, 1)")
    if not 0 < self.write_rate_init < self.write_rate_scale:
      raise ValueError(
        f"write_rate_init={self.write_rate_init} must be in"
        f" (0, write_rate_scale={self.write_rate_scale})"
      )
    if not self.rate_bound >= 0:
      raise ValueError(
        f"rate_bound={self.rate_bound} must be positive, or 0 for none"
      )
    if self.learn_phi_eps and self.phi in _NO_EPS:
      raise ValueError(
        f"learn_phi_eps=True: phi={self.phi!r} has no eps; choose a phi with a"
        " norm, or learn_phi_eps=False"
      )
    if self.convolution_width < 0 or self.convolution_width == 1:
      raise ValueError(
        f"convolution_width={self.convolution_width} must be 0 or at least 2"
      )
    steep = self.phi not in _NO_EPS and self.phi_eps < 1e-3
    if steep and not self.learned_memory:
      raise ValueError(
        f"learned_memory=False with phi={self.phi!r} has a gradient of"
        f" 1 / sqrt(phi_eps={self.phi_eps}) at the zero memory; raise"
        " phi_eps or learn the memory"
      )

  def state_floats(self, length: int) -> int:
    """Floats of the memory per sequence of any length, for one layer."""
    del length
    return self.heads * self.num_slots * (self.key_dim + self.value_dim)

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, for one layer.

    Multiply-adds count two. Token form: both passes' z, write and read.
    """
    del length
    per_head = 6 * self.num_slots * (self.key_dim + self.value_dim)
    if self.spec().stale:
      # Within a chunk the reads go through two score matrices a pass.
      dims = self.key_dim + self.value_dim + 2 * self.num_slots
      per_head += 2 * self.chunk_size * dims
    return self.heads * per_head


class TrellisState(NamedTuple):
  """State of the mixer: convolution taps (or None) and the memory.

  `stats`, how the last call's tiles were solved, `[batch, heads]`, is None
  where nobody asked (`SolverConfig`).
  """

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  memory: trellis.State
  stats: triangular.Stats | None = None


class Trellis(nnx.Module):
  """The Trellis mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: TrellisConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    heads, slots = config.heads, config.num_slots
    key_width, value_width = heads * config.key_dim, heads * config.value_dim
    passes = 2 if config.separate_gates else 1
    into = ("embed", "heads")

    def project(width, bias=None):
      return linear.Linear(d_model, width, into, std=std, bias=bias, rngs=rngs)

    self.query_key = project(key_width)
    self.value = project(value_width)
    self.target = project(heads * slots)
    self.gate = project(value_width)
    self.log_decay = project(heads * passes, linear.logit(config.decay_init))
    rate = config.write_rate_init / config.write_rate_scale
    self.write_rate = project(heads * passes, linear.logit(rate))
    self.out = linear.Linear(
      value_width, d_model, ("heads", "embed"), std=out_std, rngs=rngs
    )
    self.post_norm = norm.LayerNorm(value_width, name="heads")
    self.log_phi_eps = nnx.data(None)
    if config.learn_phi_eps:
      start = jnp.full(heads, math.log(config.phi_eps))
      self.log_phi_eps = linear.constant_param(start, ("heads",))

    width = config.convolution_width
    value_taps = width if config.convolve_value else 0
    make = short_convolution.make
    self.query_convolution = make(key_width, width, rngs=rngs)
    self.key_convolution = make(key_width, width, rngs=rngs)
    self.value_convolution = make(value_width, value_taps, rngs=rngs)

    def memory(dim, names):
      if not config.learned_memory:
        return nnx.data(None)
      return linear.normal_param(
        rngs,
        (heads, slots, dim),
        names,
        std=config.memory_std,
        weight_decay=False,
      )

    self.key_memory = memory(config.key_dim, ("heads", "slots", "key_dim"))
    self.value_memory = memory(
      config.value_dim, ("heads", "slots", "value_dim")
    )
    self.spec, self.tiling = config.spec(), config.tiling()
    self.keep_stats = config.solver.stats(config.gradient_at)
    self.heads = heads
    self.key_dim, self.value_dim = config.key_dim, config.value_dim
    self.normalize = config.normalize
    self.write_rate_scale = config.write_rate_scale
    self.rate_bound = config.rate_bound

  def init_state(self, batch: int, length: int | None = None) -> TrellisState:
    """The state before the first token; holds the learned memory."""
    del length

    taps = short_convolution.init_taps

    def value(parameter):
      return None if parameter is None else parameter[...]

    memory = trellis.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
      key_memory=value(self.key_memory),
      value_memory=value(self.value_memory),
    )
    return TrellisState(
      taps(self.query_convolution, batch),
      taps(self.key_convolution, batch),
      taps(self.value_convolution, batch),
      memory,
      triangular.no_stats((batch, self.heads)) if self.keep_stats else None,
    )

  def memories(self, state: TrellisState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return state.memory.key_memory, state.memory.value_memory

  def memory_inputs(self, x, state: TrellisState, segment_ids):
    """Projects `[batch, time, d_model]` to the memory's inputs and taps."""
    convolve = functools.partial(
      short_convolution.apply,
      segment_ids=segment_ids,
      segment_id=state.memory.segment_id,
    )
    shared = self.query_key(x)
    query, query_taps = convolve(
      self.query_convolution, shared, state.query_taps
    )
    key, key_taps = convolve(self.key_convolution, shared, state.key_taps)
    value, value_taps = convolve(
      self.value_convolution, self.value(x), state.value_taps
    )
    query, key, value, target, log_decay, write_rate = (
      linear.split_heads(y, self.heads)
      for y in (
        query,
        key,
        value,
        self.target(x),
        self.log_decay(x),
        self.write_rate(x),
      )
    )
    if self.normalize != "none":
      query, key = activations.unit(query), activations.unit(key)
    if self.normalize == "qkv":
      value = activations.unit(value)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    log_eps = None
    if self.log_phi_eps is not None:
      log_eps = jnp.broadcast_to(
        self.log_phi_eps[...].astype(wide)[:, None], (*key.shape[:-1], 1)
      )
    inputs = trellis.Inputs(
      query=query,
      key=key,
      value=value,
      target=target,
      log_decay=jax.nn.log_sigmoid(log_decay.astype(wide)),
      write_rate=self.write_rate_scale
      * jax.nn.sigmoid(write_rate.astype(wide)),
      log_phi_eps=log_eps,
    )
    if self.rate_bound:
      inputs = bounded_rate.bound(inputs, self.spec, self.rate_bound)
    return inputs, (query_taps, key_taps, value_taps)

  def _output(self, x: jax.Array, y: jax.Array) -> jax.Array:
    y = y.reshape(*y.shape[:-2], -1)
    return self.out(self.post_norm(y) * jax.nn.gelu(self.gate(x)))

  def __call__(
    self,
    x: jax.Array,
    state: TrellisState,
    context: mixer.Context,
  ) -> tuple[jax.Array, TrellisState]:
    """Mixes a sequence.

    Args:
      x: `[batch, time, d_model]`.
      state: before the first token.
      context: `segment_ids` is used.

    Returns:
      y `[batch, time, d_model]`, and the state after the last token.
    """
    segment_ids = context.segment_ids
    inputs, taps = self.memory_inputs(x, state, segment_ids)
    run = sharding.on_mesh(trellis.run, with_stats=True)
    fresh = self.init_state(x.shape[0]).memory
    memory, y, stats = run(
      state.memory,
      inputs,
      spec=self.spec,
      tiling=self.tiling,
      segment_ids=segment_ids,
      reset_state=fresh if segment_ids is not None else None,
    )
    stats = stats if self.keep_stats else None
    return self._output(x, y), TrellisState(*taps, memory, stats)

  def step(
    self, x: jax.Array, state: TrellisState, context: mixer.Context
  ) -> tuple[jax.Array, TrellisState]:
    """Mixes one token: `[batch, d_model]` in constant time."""
    del context
    x = x[:, None]
    inputs, taps = self.memory_inputs(x, state, None)
    memory, y = trellis.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    state = TrellisState(*taps, memory, state.stats)
    return self._output(x, y[:, None])[:, 0], state
