"""Trellis's write directions with gradients per token, on a TPU.

`substitution` computes U and the adjoint of z token by token, for all units of
a grid step at once. So the units meet before it. The decay has the safe form,
and a grid step has one tile.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from memcomp_kernels.pallas_tpu import LANES, blocks, schedule
from memcomp_kernels.trellis.pallas_tpu import gates as gates_lib
from memcomp_kernels.trellis.pallas_tpu import plan as plan_lib
from memcomp_kernels.trellis.pallas_tpu import substitution

nn = blocks.nn

READS_START = False
"""Whether the kernels read the memories at a chunk's start."""

scratch = substitution.scratch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gates(gates_lib.Gates):
  """Gates of a tile; rates and eps are rows by lane.

  Attributes:
    prev: Cumulative log decay before the token's own decay, a pair of `[1,
      lanes]`.
  """

  prev: plan_lib.Pair

  @staticmethod
  def more(plan, row, pair) -> dict[str, Any]:
    """Returns `prev`."""
    del plan, row
    return {"prev": pair("prev")}

  def weigh_before(
    self, p: int, scores: jax.Array, strict: jax.Array, *, transposed: bool
  ) -> jax.Array:
    """Multiplies scores with the decay up to just before the later token.

    Args:
      p: The pass.
      scores: Scores, `[tokens, lanes]`.
      strict: Mask, bool `[tokens, lanes]`: the written token is before the
        other token.
      transposed: Whether rows are the written tokens.
    """
    unit = self.plan.unit
    row, column = self.log_decay[p], self.prev[p]
    if transposed:
      row, column = column, row
    column = blocks.spread(blocks.as_column(column), unit.heads, unit.tokens)
    log = row - column if transposed else column - row
    return scores * jnp.exp(jnp.where(strict, log, -jnp.inf))

  def mu_by_token(self) -> jax.Array:
    """Returns pass 2's mu, `[tokens, width]`; the vector unit spreads it."""
    unit = self.plan.unit
    column = blocks.as_column(self.mu[1])
    return blocks.spread(column, unit.heads, unit.value_dim)

  def row_adjoints(
    self, d_reads: plan_lib.Pair, d_ends: plan_lib.Pair
  ) -> jax.Array:
    """Returns the adjoint of the rows; those by lane are not among them."""
    plan = self.plan
    named = {f"log{p}": x for p, x in enumerate(d_reads)}
    named |= {f"end{p}": x for p, x in enumerate(d_ends)}
    if plan.shared:
      for name in ("log", "end"):
        named[f"{name}0"] += named[f"{name}1"]
    none = jnp.zeros_like(named["log0"])
    return jnp.concatenate([named.get(n, none) for n in plan.row_names], 0)


class Directions:
  """The write directions U of one tile and unit; see `chunk_start.Directions`.

  Z here is without the decay of M, which `substitution` adds.
  """

  def __init__(self, refs: Any, plan: plan_lib.PerTokenPlan, s: int, g: int):
    self.solver, self.plan, self.g = refs.solver, plan, g
    self.dtype = refs.query.dtype
    width = plan.unit.heads * plan.unit.slots
    self.target = refs.target[plan_lib.tokens_of(plan, s, g, width)]
    self.u: Any = None
    self.du: list[Any] = [None, None]

  def begin(
    self, gates: Gates, z: plan_lib.Pair, products: Callable[[], plan_lib.Pair]
  ) -> Iterable[str]:
    """Stores what `substitution` reads, and waits for the other units."""
    self.gates = gates
    substitution.stage(
      self.solver, self.plan, self.g, z, products(), self.target
    )
    yield schedule.MEETS

  def write(self, p: int) -> jax.Array:
    """Returns a pass's U by slot."""
    if self.u is None:
      self.u = substitution.take_back(self.solver, self.plan, self.g)
    return self.u[p]

  write_again = write

  def take_adjoint(self, p: int, du: jax.Array) -> None:
    """Takes a pass's adjoint of U by slot."""
    self.du[p] = du

  def end(self) -> Iterable[str]:
    """Stores the adjoint of U, and waits for the other units."""
    substitution.stage_adjoint(self.solver, self.plan, self.g, tuple(self.du))
    yield schedule.MEETS
    self.dz = substitution.take_back(self.solver, self.plan, self.g)

  def pulled(self) -> plan_lib.Pair:
    """Returns the adjoint of M w, in the dtype of products."""
    return tuple(
      (dz * jnp.exp(prev)).astype(self.dtype)
      for dz, prev in zip(self.dz, self.gates.prev, strict=True)
    )

  def by_products(
    self, u: plan_lib.Pair, written: plan_lib.Pair, strict: tuple[Any, Any]
  ) -> plan_lib.Pair:
    """Returns (A + A^T) w of `backward`, as factors of products."""
    return tuple(
      [(self._coupled(p, dz, u, strict).astype(self.dtype), w)]
      for p, (dz, u, w) in enumerate(zip(self.dz, u, written, strict=True))
    )

  def finish(self) -> None:
    """Does nothing, as `backward` stores the adjoints of all targets."""

  def row_adjoints(
    self, d_reads: plan_lib.Pair, d_ends: plan_lib.Pair
  ) -> jax.Array:
    """Returns the adjoint of the rows of gates."""
    return self.gates.row_adjoints(d_reads, d_ends)

  def _coupled(self, p: int, dz: jax.Array, u: jax.Array, strict) -> jax.Array:
    """Returns the adjoint of w_t . w_i, for both tokens, `[tokens, lanes]`."""
    heads = self.plan.unit.heads
    dz = dz.astype(u.dtype)
    by_row, by_lane = strict
    seen = nn(blocks.transpose(dz, heads), blocks.diagonal(u, heads))
    seen = self.gates.weigh_before(p, seen, by_row, transposed=False)
    sees = nn(blocks.transpose(u, heads), blocks.diagonal(dz, heads))
    return seen + self.gates.weigh_before(p, sees, by_lane, transposed=True)


def lay_target(target: jax.Array) -> jax.Array:
  """Returns targets as they are, by token."""
  return target


def lay_lanes(plan: plan_lib.PerTokenPlan, gates: dict[str, jax.Array]):
  """Lays out rows `[batch, units, tiles, heads * tokens]` by lane."""
  unit = plan.unit

  def by_lane(name):
    one = gates["eps"] if name == "eps" else gates[f"{name}0"]
    x = jnp.stack([one, gates.get(f"{name}1", one)])
    _, batch, units, tiles_, _ = x.shape
    x = x.reshape(
      2,
      batch // plan.rows,
      plan.rows,
      units // plan.units,
      plan.units,
      tiles_,
      unit.heads,
      unit.tokens,
    )
    # [steps of rows, of units, tiles, tokens, heads, passes, rows, units]
    x = jnp.transpose(x, (1, 3, 5, 7, 6, 0, 2, 4))
    x = x.reshape(*x.shape[:5], 2 * plan.step_units)
    free = plan.lane_rows - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * 5 + [(0, free)])
    return x.reshape(*x.shape[:4], -1)

  return jnp.stack([by_lane(name) for name in plan.lane_row_names], axis=3)


def shape_of_lanes(plan: plan_lib.PerTokenPlan) -> jax.ShapeDtypeStruct:
  """Returns the shape of a grid step's rows by lane."""
  sizes = len(plan.lane_row_names), plan.unit.tokens, LANES
  return jax.ShapeDtypeStruct((1, 1, 1, *sizes), jnp.float32)


def blocks_of(block: Any) -> dict[str, Any]:
  """Returns the block specs of targets and of rows by lane."""
  unit, plan = block.plan.unit, block.plan
  lanes = pl.BlockSpec(
    shape_of_lanes(plan).shape,
    lambda b, u, i, *_: (b, u, block.at(i), 0, 0, 0),
  )
  return {"target": block.by_token(unit.heads * unit.slots), "lanes": lanes}


def forward(refs: Any, plan: plan_lib.PerTokenPlan, piece: Callable) -> None:
  """Emits the pieces of a tile, which meet once."""
  pieces = _solved(refs, plan, piece)
  schedule.meet(pieces, group=plan.group, skew=plan.skew)


def backward(refs: Any, plan: plan_lib.PerTokenPlan, piece: Callable) -> None:
  """Emits the pieces of a tile, which meet twice."""
  pieces = _solved(refs, plan, piece)
  schedule.meet(pieces, group=plan.group, skew=plan.skew)
  substitution.solve_transposed(refs.solver, refs.lanes, refs.d_lanes, plan)
  substitution.send_back(refs.solver, plan, refs.solver.z)
  substitution.send_targets_back(refs.solver, plan)
  for g in range(plan.step_units):
    d_target = substitution.target_of(refs.solver, plan, g)
    plan_lib.store(refs.d_target, plan, 0, g, d_target)
  schedule.meet(pieces, group=plan.group, skew=plan.skew)


def _solved(refs, plan, piece) -> list[schedule.Piece]:
  """Returns the pieces, emitted up to where U is known."""
  pieces = [piece(0, g) for g in range(plan.step_units)]
  schedule.meet(pieces, group=plan.group, skew=plan.skew)
  substitution.solve(refs.solver, refs.lanes, plan)
  substitution.send_back(refs.solver, plan, refs.solver.u)
  return pieces
