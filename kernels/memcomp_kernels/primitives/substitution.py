"""Forward substitution in a non-linear, strictly lower triangular system.

A memory whose gradient is taken at every token has, inside a tile, unknown
write directions that depend on each other only through a few numbers:

  u_t = g(z_t, a_t),   z_t = base_t - sum_{i < t} coupling_{t,i} u_i

It is solved token by token, exactly, at one activation and `time * slots`
multiply-adds each, with no memory matrix in sight: the non-linear twin of the
delta rule's triangular inverse. Its gradient is the transposed system, solved
backwards the same way.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

Direction = Callable[[jax.Array, jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def solve(
  direction: Direction,
  base: jax.Array,
  coupling: jax.Array,
  target: jax.Array,
) -> jax.Array:
  """Returns u, `[..., time, slots]`.

  Args:
    direction: g, (z, a) -> u over `[..., slots]`; a hashable function.
    base: `[..., time, slots]`.
    coupling: `[..., time, time]`; only its strict lower triangle is read.
    target: a, `[..., time, slots]`.
  """
  return _solve_fwd(direction, base, coupling, target)[0]


def _solve_fwd(direction, base, coupling, target):
  z, u = [], []
  for t in range(base.shape[-2]):
    row = base[..., t, :]
    if t:
      row = row - _combine(coupling[..., t, :t], u)
    z.append(row)
    u.append(direction(row, target[..., t, :]))
  z, u = jnp.stack(z, axis=-2), jnp.stack(u, axis=-2)
  return u, (z, u, coupling, target)


def _solve_bwd(direction, residuals, du):
  z, u, coupling, target = residuals
  time = z.shape[-2]
  dz, dtarget = [], []  # from the last token on
  for t in reversed(range(time)):
    row = du[..., t, :]
    if dz:
      later = coupling[..., t + 1 :, t][..., ::-1]
      row = row - _combine(later, dz)
    _, vjp = jax.vjp(direction, z[..., t, :], target[..., t, :])
    dz_row, dtarget_row = vjp(row)
    dz.append(dz_row)
    dtarget.append(dtarget_row)
  dz = jnp.stack(dz[::-1], axis=-2)
  dtarget = jnp.stack(dtarget[::-1], axis=-2)
  strict = jnp.tril(jnp.ones((time, time), bool), -1)
  dcoupling = -jnp.einsum(
    "...tm,...im->...ti", dz, u, precision=jax.lax.Precision.HIGHEST
  )
  return dz, jnp.where(strict, dcoupling, 0), dtarget


solve.defvjp(_solve_fwd, _solve_bwd)


def _combine(weights: jax.Array, rows: list[jax.Array]) -> jax.Array:
  """sum_i weights[..., i] rows[i]."""
  return jnp.einsum(
    "...i,...im->...m",
    weights,
    jnp.stack(rows, axis=-2),
    precision=jax.lax.Precision.HIGHEST,
  )
