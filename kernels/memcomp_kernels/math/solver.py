"""Exact solvers for non-linear, strictly lower triangular systems.

In a memory whose gradient is taken at every token, the write directions u of a
tile are unknown. They depend on each other only through a few numbers:

  u_t = g(z_t; parameters_t),   z_t = base_t - sum_{i < t} coupling_{t,i} u_i

This is the non-linear counterpart of the delta rule's triangular inverse, and
it does not contain the memory matrix. There are two methods, which solve a tile
as a whole or block by block (`Solver`):

  substitution  solves token by token: one g and `time * slots` multiply-adds
                each.
  sweeps        updates all tokens at once, repeatedly: z <- base - coupling u.
                Row t is final once the rows before it are. So `time` sweeps are
                exact for any g; often few are enough.

The gradient is that of the solution, not of the iterations. It solves the
transposed system dz_t = J_t^T (du_t - sum_{s > t} coupling_{s,t} dz_s), with
J_t the Jacobian of g at z_t, by the same method from the last token on. If its
sweeps do not reach the tolerance, a warning is logged.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, derivative
from memcomp_kernels.contract import einsum
from memcomp_kernels.options import (
  at_least,
  not_negative,
  one_of,
  option,
  options,
)

_logger = logging.getLogger("memcomp")

METHODS = ("substitution", "sweeps")

Direction = Callable[[jax.Array, Any], jax.Array]


@options
class Solver:
  """How a system is solved. It changes the speed, never the solution.

  Attributes:
    method: "substitution", or "sweeps".
    block_time: tokens solved together, >= 1. Blocks are solved in order, and a
      matrix product passes the effect of a block on to later ones. None for
      all tokens.
    tolerance: tolerance of sweeps, >= 0. They end when no z moves by more than
      this fraction of the largest |z| of its token and earlier tokens of the
      block. It is for float32, and shrinks with the rounding unit of wider
      types. 0 always sweeps block_time - 1 times, which is exact.
    max_sweeps: maximum number of sweeps, >= 1. A block that has not reached the
      tolerance by then is solved by substitution instead. None is block_time,
      after which only values that are not finite can miss the tolerance.
  """

  method: str = option("substitution", one_of(METHODS))
  block_time: int | None = option(None, at_least(1))
  tolerance: float = option(1e-6, not_negative)
  max_sweeps: int | None = option(None, at_least(1))


SUBSTITUTION = Solver()
"""All tokens of a tile one after the other."""


class Stats(NamedTuple):
  """How systems were solved: float32 `[...]`, one number per system.

  Attributes:
    blocks: number of blocks that were solved.
    sweeps: number of sweeps over all blocks; 0 by substitution.
    residual: the last relative move of z, as compared with the tolerance; the
      maximum over blocks; 0 by substitution.
    unreached: number of blocks that did not reach the tolerance and were solved
      by substitution instead.
  """

  blocks: jax.Array
  sweeps: jax.Array
  residual: jax.Array
  unreached: jax.Array


def no_stats(shape: tuple[int, ...]) -> Stats:
  """Returns the statistics of zero solves."""
  return Stats(*(jnp.zeros(shape, jnp.float32) for _ in Stats._fields))


def total(stats: Stats) -> Stats:
  """Sums over the leading axis, but takes the largest residual."""
  sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), stats)
  return sums._replace(residual=jnp.max(stats.residual, axis=0))


def solve(
  direction: Direction,
  base: jax.Array,
  coupling: jax.Array,
  parameters: Any,
  solver: Solver | None = None,
) -> tuple[jax.Array, Stats]:
  """Returns u, `[..., time, slots]`, and statistics of the solve, `[...]`.

  Args:
    direction: g, (z, parameters) -> u over `[..., slots]`, for rows of any
      leading shape; a hashable function. It must be the gradient in z of some
      loss of the row, as a write direction is, so that its Jacobian is
      symmetric.
    base: `[..., time, slots]`.
    coupling: `[..., time, time]`; only its strict lower triangle is read.
    parameters: pytree of `[..., time, *]` arrays that g takes.
    solver: method of solution; default `Solver()`.
  """
  return _solve(direction, solver or Solver(), base, coupling, parameters)


def _solved(direction, solver, base, coupling, parameters):
  return _solve_fwd(direction, solver, base, coupling, parameters)[0]


def _solve_fwd(direction, solver, base, coupling, parameters):
  base, coupling, parameters = derivative.only_first(
    (base, coupling, parameters)
  )
  z, u, stats = _in_blocks(direction, solver, base, coupling, parameters)
  return (u, stats), (z, u, coupling, parameters)


def _solve_bwd(direction, solver, residuals, cotangents):
  z, u, coupling, parameters = residuals
  du, _ = cotangents

  def transposed(row, at):
    """Returns J_t row. J_t is symmetric, because g is a gradient in z."""
    z, parameters = at
    return jax.jvp(lambda z: direction(z, parameters), (z,), (row,))[1]

  def flip(tree):  # from the last token on
    return jax.tree.map(lambda x: jnp.flip(x, z.ndim - 2), tree)

  transpose = jnp.flip(jnp.swapaxes(coupling, -1, -2), (-1, -2))
  row, dz, stats = _in_blocks(
    transposed, solver, flip(du), transpose, flip((z, parameters))
  )
  if solver.method == "sweeps" and solver.tolerance:
    # A gradient has no way to return statistics, so it logs a warning.
    missed = jnp.sum(stats.unreached)
    lax.cond(
      missed > 0,
      lambda: jax.debug.callback(_log_unreached, missed),
      lambda: None,
    )
  row, dz = flip((row, dz))
  _, vjp = jax.vjp(lambda parameters: direction(z, parameters), parameters)
  (dparameters,) = vjp(row)
  time = z.shape[-2]
  strict = jnp.tril(jnp.ones((time, time), bool), -1)
  dcoupling = jnp.where(strict, -einsum("...tm,...im->...ti", dz, u), 0)
  return dz, dcoupling, dparameters


def _log_unreached(blocks) -> None:
  _logger.warning(
    "the gradient of %d blocks did not come within the solver's tolerance: they"
    " were solved by substitution instead",
    int(blocks),
  )


_solve = derivative.custom_vjp(_solved, _solve_fwd, _solve_bwd, (0, 1))


def _in_blocks(direction, solver, base, coupling, parameters):
  """Solves block after block; returns z, u and Stats."""
  time = base.shape[-2]
  block_time = min(solver.block_time or time, time)
  solve_block = _sweep if solver.method == "sweeps" else _substitute
  axis = base.ndim - 2
  z, u, stats = [], [], []
  for start in range(0, time, block_time):
    end = min(start + block_time, time)
    rows = base[..., start:end, :]
    if u:
      earlier = coupling[..., start:end, :start]
      done = jnp.concatenate(u, axis=-2)
      rows = rows - einsum("...ti,...im->...tm", earlier, done)
    own = jax.tree.map(
      lambda x, start=start, end=end: lax.slice_in_dim(
        x, start, end, axis=axis
      ),
      parameters,
    )
    within = coupling[..., start:end, start:end]
    block = solve_block(direction, solver, rows, within, own)
    for kept, new in zip((z, u, stats), block, strict=True):
      kept.append(new)
  stats = total(jax.tree.map(lambda *blocks: jnp.stack(blocks), *stats))
  return jnp.concatenate(z, axis=-2), jnp.concatenate(u, axis=-2), stats


def _substitute(direction, solver, base, coupling, parameters):
  """Solves token by token, and reads finished rows only."""
  del solver
  axis, time = base.ndim - 2, base.shape[-2]
  strict = jnp.tril(jnp.ones((time, time), bool), -1)
  coupling = jnp.where(strict, coupling, 0)

  def body(done, token):
    t, row, weights, own = token
    row = row - einsum("...i,...im->...m", weights, done)
    new = direction(row, own)
    return lax.dynamic_update_index_in_dim(done, new, t, axis), row

  tokens = jax.tree.map(
    lambda x: jnp.moveaxis(x, axis, 0), (base, coupling, parameters)
  )
  u, z = lax.scan(body, jnp.zeros_like(base), (jnp.arange(time), *tokens))
  none = no_stats(base.shape[:-2])
  return jnp.moveaxis(z, 0, axis), u, none._replace(blocks=none.blocks + 1)


def _sweep(direction, solver, base, coupling, parameters):
  """Updates all tokens at once until nothing moves."""
  time = base.shape[-2]
  strict = jnp.tril(jnp.ones((time, time), bool), -1)
  coupling = jnp.where(strict, coupling, 0)

  def sweep(u):
    # A row may overflow on the way. Multiplied by a masked 0 it would give nan
    # in rows that are already finished.
    u = jnp.where(jnp.isfinite(u), u, 0)
    z = base - einsum("...ti,...im->...tm", coupling, u)
    return z, direction(z, parameters)

  none = jnp.zeros(base.shape[:-2], jnp.float32)
  z, u = base, direction(base, parameters)
  if not solver.tolerance:
    for _ in range(time - 1):
      z, u = sweep(u)
    return z, u, Stats(none + 1, none + (time - 1), none, none)

  unit = jnp.finfo(base.dtype).eps / jnp.finfo(jnp.float32).eps
  tolerance = solver.tolerance * min(unit, 1)

  def over(residual):
    return ~(residual <= tolerance)  # also true for nan

  def body(carry):
    count, z, u, _ = carry
    new, u = sweep(u)
    moved = jnp.max(jnp.abs(new - z), axis=-1)
    size = lax.cummax(jnp.max(jnp.abs(new), axis=-1), axis=moved.ndim - 1)
    residual = moved / jnp.maximum(size, jnp.finfo(size.dtype).tiny)
    # Sweeps clear values that are not finite, so z may stand still with them.
    sound = jnp.all(jnp.isfinite(u), axis=(-2, -1))
    residual = jnp.where(sound, jnp.max(residual, axis=-1), jnp.inf)
    return count + 1, new, u, residual.astype(jnp.float32)

  def again(carry):
    limit = min(solver.max_sweeps or time, time)
    return (carry[0] < limit) & jnp.any(over(carry[3]))

  first = contract.vary_like((z, u, none + jnp.inf), base)
  first = jnp.zeros((), jnp.float32), *first
  count, z, u, residual = lax.while_loop(again, body, first)
  unreached = over(residual)

  def exactly():
    return _substitute(direction, solver, base, coupling, parameters)[:2]

  z, u = lax.cond(jnp.any(unreached), exactly, lambda: (z, u))
  missed = unreached.astype(jnp.float32)
  return z, u, Stats(none + 1, none + count, residual, missed)
