"""The Lattice mixer: projections, convolutions and gates around the memory.

x -> W_qk -> two short convolutions -> q, k (codes over the slots);  W_v -> v;
decay and rate gates -> Lattice -> * GELU(x W_g) -> W_o
(arXiv 2504.05646, figure 2 and appendix A; docs/lattice.md explains our
choices).
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from memcomp.layers import linear, norm, options, parameters, solved
from memcomp_kernels import lattice
from memcomp_kernels.lattice import orthonormal_slots
from memcomp_kernels.options import not_negative, one_of, option

MEMORY_INITS = ("learned", "fixed")


@options.config_class
class LatticeConfig(solved.SolvedConfig):
  """Options of Lattice.

  Attributes:
    num_slots: slots per head, at most value_dim: the initial slots are
      orthonormal. 0 is as many as value_dim, up to 64.
    key_dim: unused; a key is a code over the slots.
    memory_init: whether the orthonormal initial slots are "learned" or "fixed".
    post_norm: whether a layer norm follows the memory.
  """

  op = lattice

  num_slots: int = option(0, not_negative)
  memory_init: str = option("learned", one_of(MEMORY_INITS))
  post_norm: bool = False

  def fill(self, d_model: int) -> dict[str, Any]:
    """The sizes that follow from the width; slots are value_dim, up to 64."""
    config = self
    if self.heads and d_model % self.heads and not self.key_dim:
      # The key's width is not a size of this layer, so it need not divide.
      config = dataclasses.replace(self, key_dim=1)
    found = solved.SolvedConfig.fill(config, d_model)
    value_dim = found.get("value_dim", self.value_dim)
    slots = self.num_slots or min(value_dim, lattice.Spec().num_slots)
    return found | {"num_slots": slots}

  def derived(self) -> dict[str, Any]:
    """The number of slots; the Spec's default if `fill` has not set it."""
    return {"num_slots": self.num_slots or lattice.Spec().num_slots}

  def tiling(self) -> lattice.Tiling:
    """The op's tiling, with the solver of the per-token gradients."""
    solver, tiling = self.solver, lattice.Tiling()
    if solver.method != "auto":
      tiling = dataclasses.replace(
        tiling, solver=solver.method, tolerance=solver.tolerance
      )
    if solver.tile_time:
      tiling = dataclasses.replace(tiling, tile_time=solver.tile_time)
    return tiling

  def check(self) -> None:
    """Raises ValueError if fields contradict each other."""
    solved.SolvedConfig.check(self)
    if self.value_dim and self.num_slots > self.value_dim:
      raise ValueError(
        f"num_slots={self.num_slots} must be at most"
        f" value_dim={self.value_dim}, as the initial slots are orthonormal;"
        " give fewer slots, or fewer heads"
      )


class Lattice(solved.SolvedMixer):
  """Lattice: projections, convolutions and gates around the memory."""

  Config = LatticeConfig

  def build(self, config: LatticeConfig, make: parameters.Make) -> None:
    """Makes the parameters."""
    heads, slots = self.heads, self.spec.num_slots
    codes, values = heads * slots, heads * self.value_dim
    self.query_key = make.project(codes)
    self.value = make.project(values)
    self.gate = make.project(values)
    self.build_gates(config, make, heads)
    self.out = make.out(values)
    self.post_norm = nnx.data(
      norm.LayerNorm(values, name="heads") if config.post_norm else None
    )
    self.build_convolutions(config, make, codes)
    self.initial_memory = nnx.data(None)
    if config.memory_init == "learned":
      slots_at_start = orthonormal_slots(
        make.rngs.params(),
        heads=heads,
        value_dim=self.value_dim,
        num_slots=slots,
      )
      self.initial_memory = linear.constant_param(
        slots_at_start, ("heads", "value_dim", "slots")
      )

  def fresh_state(
    self, batch: int, length: int | None = None
  ) -> solved.SolvedState:
    """The state before the first token, with the initial slots."""
    del length
    initial = self.initial_memory
    memory = self.init_memory(
      batch, key_dim=None, memory=None if initial is None else initial[...]
    )
    return self.with_taps(batch, memory)

  def inputs(self, x, state, call):
    """Projects `[batch, time, d_model]` to the memory's inputs."""
    query, key, value, state = self.query_key_value(x, state, call)
    log_decay, write_rate = self.gates(x)
    inputs = lattice.Inputs(
      query=query,
      key=key,
      value=value,
      log_decay=log_decay,
      write_rate=write_rate,
    )
    return inputs, state

  def outputs(self, x, y):
    """Applies the optional layer norm, the gate and the output projection."""
    y = linear.join_heads(y)
    if self.post_norm is not None:
      y = self.post_norm(y)
    return self.out(y * jax.nn.gelu(self.gate(x)))
