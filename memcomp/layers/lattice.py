"""The Lattice mixer: projections, convolutions and gates around the memory.

x -> W_qk -> two short convolutions -> q, k (codes over the slots);  W_v -> v;
decay and rate gates -> Lattice -> * GELU(x W_g) -> W_o
(arXiv 2504.05646, figure 2 and appendix A; docs/lattice.md has the choices).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear, mixer, norm, short_convolution
from memcomp_kernels.lattice import api as lattice
from memcomp_kernels.primitives import activations, triangular

NORMALIZE = ("none", "qk", "qkv")
MEMORY_INITS = ("learned", "fixed")


@dataclasses.dataclass(kw_only=True, slots=True)
class LatticeConfig(mixer.MixerConfig):
  """A Lattice mixer; the first fields are those of the kernel's `Spec`.

  Attributes:
    num_slots: see `memcomp_kernels.lattice.types.Spec`, as all down to
      `chunk_size`. At most value_dim: the initial slots are orthonormal.
    objective: "decoding", "encoding" or "similarity".
    update: "delta", "orthogonal" or "normalized".
    forget_gate: whether the memory decays (L2).
    sparsity: of the L1 variant; 0 is off.
    gradient_at: "chunk_start" or "token".
    chunk_size: tokens that share a chunk-start gradient.
    heads: memories side by side.
    key_dim: unused: a key is a code over the slots. Kept so that every mixer
      has the same fields for its sizes.
    value_dim: features of a head's value.
    normalize: L2-norm of "none", "qk" or "qkv" before the memory.
    decay_init: decay factor at the start, in (0, 1).
    write_rate_init: write rate at the start, in (0, write_rate_scale).
    write_rate_scale: the largest write rate.
    memory_init: orthonormal slots that are "learned" from there or "fixed".
    post_norm: a layer norm on what is read.
    convolution_width: taps of the short convolutions; 0 for none.
    convolve_value: a convolution on v too.
    solver: how gradients per token are evaluated.
  """

  num_slots: int = 64
  objective: str = "decoding"
  update: str = "normalized"
  forget_gate: bool = True
  sparsity: float = 0.0
  gradient_at: str = "chunk_start"
  chunk_size: int = 16
  heads: int = 12
  key_dim: int = 64
  value_dim: int = 64
  normalize: str = "qk"
  decay_init: float = 0.982
  write_rate_init: float = 0.3
  write_rate_scale: float = 1.0
  memory_init: str = "learned"
  post_norm: bool = False
  convolution_width: int = 4
  convolve_value: bool = False

  solver: mixer.SolverConfig = dataclasses.field(
    default_factory=mixer.SolverConfig
  )

  def spec(self) -> lattice.Spec:
    """The memory's meaning.

    Raises:
      ValueError: naming the field that is out of range.
    """
    names = [field.name for field in dataclasses.fields(lattice.Spec)]
    return lattice.Spec(**{name: getattr(self, name) for name in names})

  def tiling(self) -> lattice.Tiling:
    """How gradients per token are evaluated."""
    solver, tiling = self.solver, lattice.Tiling()
    if solver.method != "auto":
      tiling = dataclasses.replace(
        tiling, solver=solver.method, tolerance=solver.tolerance
      )
    if solver.tile_time:
      tiling = dataclasses.replace(tiling, tile_time=solver.tile_time)
    return tiling

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    self.spec()
    self.solver.validate()
    mixer.require_positive(self, "heads", "value_dim")
    if self.num_slots > self.value_dim:
      raise ValueError(
        f"num_slots={self.num_slots} must be at most value_dim="
        f"{self.value_dim}: the initial slots are orthonormal"
      )
    for name, choices in (
      ("normalize", NORMALIZE),
      ("memory_init", MEMORY_INITS),
    ):
      if getattr(self, name) not in choices:
        raise ValueError(
          f"{name}={getattr(self, name)!r} is not one of: {', '.join(choices)}"
        )
    if not 0 < self.decay_init < 1:
      raise ValueError(f"decay_init={self.decay_init} must be in (0, 1)")
    if not 0 < self.write_rate_init < self.write_rate_scale:
      raise ValueError(
        f"write_rate_init={self.write_rate_init} must be in"
        f" (0, write_rate_scale={self.write_rate_scale})"
      )
    if self.convolution_width < 0 or self.convolution_width == 1:
      raise ValueError(
        f"convolution_width={self.convolution_width} must be 0 or at least 2"
      )

  def state_floats(self, length: int) -> int:
    """Floats of the memory per sequence of any length, for one layer."""
    del length
    return self.heads * self.num_slots * self.value_dim

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, for one layer.

    Multiply-adds count two: the loss, the tangent, the write, the read.
    """
    del length
    per_head = 8 * self.num_slots * self.value_dim
    if self.spec().stale:
      # Within a chunk reads go through a score matrix, weighed slot by slot.
      per_head += self.chunk_size * (3 * self.num_slots + 2 * self.value_dim)
    return self.heads * per_head


class LatticeState(NamedTuple):
  """State of the mixer: convolution taps (or None) and the memory.

  `stats`, how the last call's tiles were solved, `[batch, heads]`, is None
  where nobody asked (`SolverConfig`).
  """

  query_taps: jax.Array | None
  key_taps: jax.Array | None
  value_taps: jax.Array | None
  memory: lattice.State
  stats: triangular.Stats | None = None


class Lattice(nnx.Module):
  """The Lattice mixer.

  Args:
    config: its configuration.
    d_model: features in and out.
    std: of the weights at the start.
    out_std: of the output projection at the start.
    rngs: random streams.
  """

  def __init__(
    self,
    config: LatticeConfig,
    d_model: int,
    *,
    std: float,
    out_std: float,
    rngs: nnx.Rngs,
  ):
    config.validate()
    heads, slots = config.heads, config.num_slots
    code_width, value_width = heads * slots, heads * config.value_dim
    into = ("embed", "heads")

    def project(width, bias=None):
      return linear.Linear(d_model, width, into, std=std, bias=bias, rngs=rngs)

    self.query_key = project(code_width)
    self.value = project(value_width)
    self.gate = project(value_width)
    self.log_decay = project(heads, linear.logit(config.decay_init))
    rate = config.write_rate_init / config.write_rate_scale
    self.write_rate = project(heads, linear.logit(rate))
    self.out = linear.Linear(
      value_width, d_model, ("heads", "embed"), std=out_std, rngs=rngs
    )
    self.post_norm = nnx.data(
      norm.LayerNorm(value_width, name="heads") if config.post_norm else None
    )

    width = config.convolution_width
    value_taps = width if config.convolve_value else 0
    make = short_convolution.make
    self.query_convolution = make(code_width, width, rngs=rngs)
    self.key_convolution = make(code_width, width, rngs=rngs)
    self.value_convolution = make(value_width, value_taps, rngs=rngs)

    self.initial_memory = nnx.data(None)
    if config.memory_init == "learned":
      slots_at_start = lattice.orthonormal_slots(
        rngs.params(),
        heads=heads,
        value_dim=config.value_dim,
        num_slots=slots,
      )
      self.initial_memory = linear.constant_param(
        slots_at_start, ("heads", "value_dim", "slots")
      )
    self.spec, self.tiling = config.spec(), config.tiling()
    self.keep_stats = config.solver.stats(config.gradient_at)
    self.heads = heads
    self.value_dim = config.value_dim
    self.normalize = config.normalize
    self.write_rate_scale = config.write_rate_scale

  def init_state(self, batch: int, length: int | None = None) -> LatticeState:
    """The state before the first token; holds the initial slots."""
    del length

    taps = short_convolution.init_taps

    initial = self.initial_memory
    memory = lattice.init_state(
      self.spec,
      batch=batch,
      heads=self.heads,
      value_dim=self.value_dim,
      memory=None if initial is None else initial[...],
    )
    return LatticeState(
      taps(self.query_convolution, batch),
      taps(self.key_convolution, batch),
      taps(self.value_convolution, batch),
      memory,
      triangular.no_stats((batch, self.heads)) if self.keep_stats else None,
    )

  def memories(self, state: LatticeState) -> tuple[jax.Array, ...]:
    """The arrays whose size tells how full the memory is."""
    return (state.memory.memory,)

  def memory_inputs(self, x, state: LatticeState, segment_ids):
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
    query, key, value, log_decay, write_rate = (
      linear.split_heads(y, self.heads)
      for y in (query, key, value, self.log_decay(x), self.write_rate(x))
    )
    if self.normalize != "none":
      query, key = activations.unit(query), activations.unit(key)
    if self.normalize == "qkv":
      value = activations.unit(value)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    inputs = lattice.Inputs(
      query=query,
      key=key,
      value=value,
      log_decay=jax.nn.log_sigmoid(log_decay.astype(wide)),
      write_rate=self.write_rate_scale
      * jax.nn.sigmoid(write_rate.astype(wide)),
    )
    return inputs, (query_taps, key_taps, value_taps)

  def _output(self, x: jax.Array, y: jax.Array) -> jax.Array:
    y = y.reshape(*y.shape[:-2], -1)
    if self.post_norm is not None:
      y = self.post_norm(y)
    return self.out(y * jax.nn.gelu(self.gate(x)))

  def __call__(
    self, x: jax.Array, state: LatticeState, context: mixer.Context
  ) -> tuple[jax.Array, LatticeState]:
    """Mixes a sequence `[batch, time, d_model]`; see `layers.mixer`."""
    segment_ids = context.segment_ids
    inputs, taps = self.memory_inputs(x, state, segment_ids)
    run = sharding.on_mesh(lattice.run, with_stats=True)
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
    return self._output(x, y), LatticeState(*taps, memory, stats)

  def step(
    self, x: jax.Array, state: LatticeState, context: mixer.Context
  ) -> tuple[jax.Array, LatticeState]:
    """Mixes one token: `[batch, d_model]` in constant time."""
    del context
    x = x[:, None]
    inputs, taps = self.memory_inputs(x, state, None)
    memory, y = lattice.step(
      state.memory, jax.tree.map(lambda a: a[:, 0], inputs), spec=self.spec
    )
    state = LatticeState(*taps, memory, state.stats)
    return self._output(x, y[:, None])[:, 0], state
