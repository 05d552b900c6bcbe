"""The writes of a tile by sweeps: a fixed point of matrix products.

Given a guess of all r, h and |s|^2 of a tile, a few matrix products give new
values. Those of token t depend on earlier tokens alone. So a tile of C tokens
is exact after C - 1 sweeps, one more confirms it, and often a few suffice. Rows
that are not final yet may overflow, and zero times infinity would spoil final
rows. So values that are not finite count as zero until the end. If any are left
then, or if something still moves, forward substitution solves the tile.

The cotangents of the unknowns solve the transposed system by the same sweeps,
and by substitution in the same cases.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, derivative
from memcomp_kernels.contract import einsum
from memcomp_kernels.lattice import reference, tilings
from memcomp_kernels.lattice.per_token import substitution, writes
from memcomp_kernels.math import solver


class _Unknowns(NamedTuple):
  """The unknowns of a tile's tokens, all `[batch, heads, time, ...]`.

  Attributes:
    share: r.
    h: the directions; None where they are known.
    before: the columns before each token.
  """

  share: jax.Array
  h: jax.Array | None
  before: writes.Columns


def _shifted(first: jax.Array, x: jax.Array) -> jax.Array:
  """Returns the previous token's value, along axis 2; `first` at token 0."""
  return jnp.concatenate([first[:, :, None], x[:, :, :-1]], axis=2)


def _sweep(spec, S, tokens, guess: _Unknowns):
  """Returns the unknowns that follow from a guess, and the solution."""
  share, unknown, before = guess
  h = substitution.directions(tokens, spec) if unknown is None else unknown
  length = jnp.sum(h * h, axis=-1, keepdims=True)
  keep, write, after = writes.factors(share, length, before, tokens, spec)
  t = jnp.arange(keep.shape[-2])[:, None, None]
  j = jnp.arange(keep.shape[-2])[:, None]
  # Products of lambda from j + 1 to t, times w_j: [batch, heads, t, j, slots].
  W = lax.cumprod(jnp.where(t > j, keep[..., :, None, :], 1), axis=2)
  W = jnp.where(t >= j, W * jnp.where(t >= j, write[..., None, :, :], 0), 0)
  A = lax.cumprod(keep, axis=2)

  A_before = _shifted(jnp.ones_like(A[:, :, 0]), A)
  W_before = _shifted(jnp.zeros_like(W[:, :, 0]), W)
  new_before = jax.tree.map(_shifted, writes.before_tile(S), after)
  new_h, row = None, h
  if unknown is not None:
    key = writes.over_norm(tokens.key, new_before.squares, spec)
    row = einsum("bhdm,bhtm->bhtd", S, A_before * key) - tokens.value
    seen = einsum("bhtjm,bhtm->bhtj", W_before, key)
    new_h = row = row + einsum("bhtj,bhjd->bhtd", seen, h)
  products = einsum("bhtd,bhjd->bhtj", row, h)
  products = jnp.where((t > j)[..., 0], products, 0)
  share = A_before * einsum("bhdm,bhtd->bhtm", S, row)
  share = share + einsum("bhtj,bhtjm->bhtm", products, W_before)
  solution = substitution.Solution(
    h=h,
    from_start=A * tokens.query,
    scores=einsum("bhtjm,bhtm->bhtj", W, tokens.query),
    keep=A[:, :, -1],
    write=W[:, :, -1],
    after=jax.tree.map(lambda x: x[:, :, -1], after),
  )
  return _Unknowns(share, new_h, new_before), solution


def _stale(spec, S, tokens) -> _Unknowns:
  """Returns the first guess: every token sees the memory before the tile."""
  time = tokens.key.shape[-2]
  before = jax.tree.map(
    lambda x: jnp.broadcast_to(
      x[:, :, None], (*x.shape[:2], time, x.shape[-1])
    ),
    writes.before_tile(S),
  )
  unknown = None
  if spec.objective != "decoding":
    h = substitution.directions(tokens, spec)
  else:
    key = writes.over_norm(tokens.key, before.squares, spec)
    h = unknown = einsum("bhdm,bhtm->bhtd", S, key) - tokens.value
  return _Unknowns(einsum("bhdm,bhtd->bhtm", S, h), unknown, before)


def tolerance_of(tiling: tilings.Tiling, dtype: jnp.dtype) -> float:
  """Returns the largest move that still counts as converged."""
  return tiling.tolerance * (1e-8 if dtype == jnp.float64 else 1)


def _moved(new, old, reverse) -> jax.Array:
  """Returns the largest move, relative to the values up to each token.

  It is infinite where something is not finite, which is no fixed point.
  """

  def moved(x, y):
    scale = lax.cummax(jnp.max(jnp.abs(x), axis=-1), axis=2, reverse=reverse)
    share = jnp.max(jnp.abs(x - y), axis=-1)
    share = share / jnp.maximum(scale, jnp.finfo(x.dtype).tiny)
    return jnp.where(jnp.all(jnp.isfinite(x)), jnp.max(share), jnp.inf)

  leaves = jax.tree.leaves(jax.tree.map(moved, new, old))
  return functools.reduce(jnp.maximum, leaves)


def fixed_point(function, start, tolerance, count, reverse=False):
  """Returns x = function(x), its last move, and the number of sweeps.

  Values that are not finite are cleared, so that one sweep's overflow does not
  spoil the next.
  """

  def cleared(x):
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), x)

  def unfinished(carry):
    _, residual, swept = carry
    return ~(residual <= tolerance) & (swept < count)

  def sweep(carry):
    x, _, swept = carry
    new = function(x)
    return cleared(new), _moved(new, x, reverse), swept + 1

  start = cleared(start)
  residual = jnp.array(jnp.inf, jax.tree.leaves(start)[0].dtype)
  first = contract.vary_like((start, residual), start)
  return lax.while_loop(unfinished, sweep, (*first, jnp.array(0)))


def _solve(
  spec: reference.Spec,
  tiling: tilings.Tiling,
  S: jax.Array,
  tokens: writes.TokenInputs,
) -> tuple[substitution.Solution, solver.Stats]:
  """Returns `substitution.solve` up to the tolerance, and statistics."""
  return _solve_fwd(spec, tiling, S, tokens)[0]


def _solve_fwd(spec, tiling, S, tokens):
  S, tokens = derivative.only_first((S, tokens))
  tolerance = tolerance_of(tiling, S.dtype)
  x, residual, swept = fixed_point(
    lambda x: _sweep(spec, S, tokens, x)[0],
    _stale(spec, S, tokens),
    tolerance,
    tokens.key.shape[-2],
  )
  done = residual <= tolerance
  solution = lax.cond(
    done,
    lambda: _sweep(spec, S, tokens, x)[1],
    lambda: substitution.solve(spec, S, tokens),
  )
  none = jnp.zeros(S.shape[:2], jnp.float32)
  stats = solver.Stats(
    blocks=none + 1,
    sweeps=none + swept,
    residual=none + residual.astype(none.dtype),
    unreached=none + ~done,
  )
  return (solution, stats), (S, tokens, x, done)


def _solve_bwd(spec, tiling, residuals, cotangents):
  S, tokens, x, done = residuals
  cotangents, _ = cotangents
  tolerance = tolerance_of(tiling, S.dtype)
  _, vjp = jax.vjp(functools.partial(_sweep, spec), S, tokens, x)
  dx, residual, _ = fixed_point(
    lambda dx: vjp((dx, cotangents))[2],
    jax.tree.map(jnp.zeros_like, x),
    tolerance,
    tokens.key.shape[-2] + 1,  # the zeros to start from say nothing of a token
    reverse=True,
  )
  return lax.cond(
    done & (residual <= tolerance),
    lambda: vjp((dx, cotangents))[:2],
    lambda: jax.vjp(functools.partial(substitution.solve, spec), S, tokens)[1](
      cotangents
    ),
  )


solve = derivative.custom_vjp(_solve, _solve_fwd, _solve_bwd, (0, 1))
