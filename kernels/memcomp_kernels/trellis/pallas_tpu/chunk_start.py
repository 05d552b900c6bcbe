"""Trellis's write directions with gradients at the chunk's start, on a TPU.

All pre-activations z of a chunk are known at once, from the memories at its
start, so the kernels compute each unit's directions on their own.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memcomp_kernels.pallas_tpu import activations, blocks, schedule
from memcomp_kernels.trellis.pallas_tpu import gates as gates_lib
from memcomp_kernels.trellis.pallas_tpu import plan as plan_lib

READS_START = True
"""Whether the kernels read the memories at a chunk's start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gates(gates_lib.Gates):
  """Gates with the write rate of each token.

  Attributes:
    write_rate: Write rates times -`activations.rate_scale`, a pair of `[1,
      lanes]`. The negative sign means that every write is added.
    eps: Epsilon of the activation phi.
  """

  write_rate: plan_lib.Pair
  eps: Any

  @staticmethod
  def more(plan, row, pair) -> dict[str, Any]:
    """Returns `write_rate` and `eps`."""
    eps = row("eps") if plan.phi_eps is None else plan.phi_eps
    return {"write_rate": pair("rate"), "eps": eps}

  @property
  def rate(self) -> plan_lib.Pair:
    """The factor of U."""
    first, second = self.write_rate
    if self.inverse is None:
      return first, second
    return first * self.inverse[0], second * self.inverse[1]

  def omega(self, causal: jax.Array) -> tuple[Any, Any]:
    """Returns Omega, a pair of `[tokens, lanes]`; None if separable.

    The forward kernel computes it early and lets the matrix unit spread it.
    Both are faster there, because that kernel holds fewer arrays at a time.
    """
    if not self.plan.safe:
      return None, None
    unit = self.plan.unit

    def between(row):
      column = blocks.by_token(row, unit.heads, unit.tokens)
      return jnp.exp(jnp.where(causal, column - row, -jnp.inf))

    first = between(self.log_decay[0])
    return first, first if self.plan.shared else between(self.log_decay[1])

  def mu_by_token(self) -> jax.Array:
    """Returns pass 2's mu, `[tokens, width]`; the matrix unit spreads it."""
    unit = self.plan.unit
    return blocks.by_token(self.mu[1], unit.heads, unit.value_dim)

  def row_adjoints(
    self,
    d_reads: plan_lib.Pair,
    d_rate: plan_lib.Pair,
    d_eps: plan_lib.Pair,
    d_ends: plan_lib.Pair,
  ) -> jax.Array:
    """Returns the adjoint of the rows.

    Args:
      d_reads: Result of `sum_reads`.
      d_rate: Adjoint of the scaled rates, `[1, lanes]`.
      d_eps: Adjoint of eps, `[1, lanes]`; not read unless eps is a row.
      d_ends: Result of `sum_ends`.
    """
    plan = self.plan
    log_decay = [-d * rate for d, rate in zip(d_rate, self.rate, strict=True)]
    if self.inverse is not None:
      d_rate = tuple(d * x for d, x in zip(d_rate, self.inverse, strict=True))
    rows = {"log": log_decay, "rate": d_rate}
    named = {
      f"{name}{p}": x for name, pair in rows.items() for p, x in enumerate(pair)
    }
    for p in (0, 1):
      named[f"log{p}"] += d_reads[p]
      named[f"end{p}"] = d_ends[p]
    if plan.shared:
      for name in ("log", "rate", "end"):
        named[f"{name}0"] += named[f"{name}1"]
    if plan.phi_eps is None:
      named["eps"] = d_eps[0] + d_eps[1]
    none = jnp.zeros_like(d_rate[0])
    return jnp.concatenate([named.get(n, none) for n in plan.row_names], 0)


class Directions:
  """The write directions U of one chunk and unit, and their adjoints.

  The methods are called in the order in which they stand; `per_token` has the
  same ones. A pass is 0 or 1.
  """

  def __init__(self, refs: Any, plan: plan_lib.ChunkStartPlan, s: int, g: int):
    self.refs, self.plan, self.s, self.g = refs, plan, s, g
    self.dtype = refs.query.dtype
    self.target = load_target(refs.target, plan, s, g)
    self.pulls: list[Any] = [None, None]
    self.adjoints: list[Any] = [None, None]

  def begin(
    self, gates: Gates, z: plan_lib.Pair, products: Callable[[], plan_lib.Pair]
  ) -> Iterable[str]:
    """Takes z by slot; `products` computes w_t . w_i of both passes.

    Returns:
      What the piece yields until U is known.
    """
    del products
    self.gates, self.z = gates, z
    return ()

  def write(self, p: int) -> jax.Array:
    """Returns a pass's U by slot, in the forward kernel."""
    gates, z = self.gates, self.z[p]
    return activations.direction(
      self.plan.phi, z, self.target, gates.eps, gates.rate[p]
    )

  def write_again(self, p: int) -> jax.Array:
    """Returns a pass's U by slot, in the backward kernel."""
    gates, z = self.gates, self.z[p]
    u, self.pulls[p] = plan_lib.direction(
      self.plan, z, self.target, gates.eps, gates.rate[p]
    )
    return u

  def take_adjoint(self, p: int, du: jax.Array) -> None:
    """Takes a pass's adjoint of U by slot; that of pass 0 comes last."""
    dz, *rest = self.pulls[p](du)
    self.adjoints[p] = dz.astype(self.dtype), *rest

  def end(self) -> Iterable[str]:
    """Returns what the piece yields until the adjoint of z is known."""
    return ()

  def pulled(self) -> plan_lib.Pair:
    """Returns the adjoint of z by slot, in the dtype of products."""
    return tuple(dz for dz, *_ in self.adjoints)

  def by_products(
    self, u: plan_lib.Pair, written: plan_lib.Pair, strict: tuple[Any, Any]
  ) -> plan_lib.Pair:
    """Returns further terms of the adjoint of w, as factors of products.

    Args:
      u: U in the dtype of products, of both passes.
      written: w on the diagonals of blocks, of both passes.
      strict: Masks, bool `[tokens, lanes]`: the lane's token is before the
        row's, and transposed.
    """
    del u, written, strict
    return [], []

  def finish(self) -> None:
    """Stores the adjoint of the target, where each unit has its own."""
    d = self.adjoints[0][1] + self.adjoints[1][1]
    store_target(self.refs.d_target, self.plan, self.s, self.g, d)

  def row_adjoints(
    self, d_reads: plan_lib.Pair, d_ends: plan_lib.Pair
  ) -> jax.Array:
    """Returns the adjoint of the rows of gates."""
    _, _, d_rate, d_eps = zip(*self.adjoints, strict=True)
    return self.gates.row_adjoints(d_reads, d_rate, d_eps, d_ends)


def lay_target(target: jax.Array) -> jax.Array:
  """Returns targets `[batch, time, heads * slots]` in the layout by slot."""
  return jnp.swapaxes(target, 1, 2)


def lay_lanes(plan: plan_lib.Plan, gates: dict[str, jax.Array]) -> None:
  """Returns None, as no gates are rows by lane."""
  del plan, gates


def shape_of_lanes(plan: plan_lib.Plan) -> None:
  """Returns None, as no gates are rows by lane."""
  del plan


def blocks_of(block: Any) -> dict[str, Any]:
  """Returns the block specs of targets and of rows by lane."""
  unit, plan = block.plan.unit, block.plan
  rows = plan.units * unit.heads * unit.slots
  shape = 1, rows, unit.tokens * plan.chunks
  target = pl.BlockSpec(shape, lambda b, u, i, *_: (b, u, block.at(i)))
  return {"target": target, "lanes": None}


def scratch(plan: plan_lib.Plan, *, backward: bool) -> None:
  """Returns None, as no scratch is needed."""
  del plan, backward


def load_target(ref: jax.Ref, plan: plan_lib.Plan, s: int, g: int) -> jax.Array:
  """Loads a chunk's and unit's target by slot, float32 `[slots, lanes]`."""
  unit = plan.unit
  rows = unit.heads * unit.slots
  block = ref[0, pl.ds(g * rows, rows), :]
  lanes = slice(s * unit.tokens, (s + 1) * unit.tokens)
  target = blocks.side_by_side(block, unit.heads, lanes)
  return activations.prepare_target(plan.phi, target.astype(jnp.float32))


def store_target(
  ref: jax.Ref, plan: plan_lib.Plan, s: int, g: int, d_prepared: jax.Array
) -> None:
  """Stores the adjoint of a chunk's targets; `d_prepared` is by slot."""
  unit = plan.unit
  # `prepare_target` is a projection, and so its own adjoint.
  d = activations.prepare_target(plan.phi, d_prepared).astype(ref.dtype)
  for h in range(unit.heads):
    rows = pl.ds((g * unit.heads + h) * unit.slots, unit.slots)
    lanes = pl.ds(s * unit.tokens, unit.tokens)
    ref[0, rows, lanes] = d[:, h * unit.tokens : (h + 1) * unit.tokens]


def forward(refs: Any, plan: plan_lib.ChunkStartPlan, piece: Callable) -> None:
  """Emits the pieces of a grid step's chunks, first to last."""
  del refs
  _emit(plan, piece, range(plan.chunks))


def backward(refs: Any, plan: plan_lib.ChunkStartPlan, piece: Callable) -> None:
  """Emits the pieces of a grid step's chunks, last to first."""
  del refs
  _emit(plan, piece, range(plan.chunks - 1, -1, -1))


def _emit(
  plan: plan_lib.ChunkStartPlan, piece: Callable, chunks: range
) -> None:
  order = {"group": plan.group, "skew": plan.skew}
  schedule.run(piece, chunks=chunks, units=plan.units, **order)
