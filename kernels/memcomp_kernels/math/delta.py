"""The exact writes of the delta rule, from a unit-triangular system.

A memory A [key, value] writes the part of a value that it does not predict yet:

  A_t = a_t A_{t-1} + eta_t k_t (x) u_t,      u_t = v_t - k_t A',

where A' is the memory that token t sees. In a tile of tokens only the u are
unknown, and one lower triangular matrix couples them. S_{t,i} is the share of
write i in A' (zero for i >= t), and base_t is the share of the memory A before
the tile. Then

  u_t + sum_{i < t} S_{t,i} eta_i (k_t . k_i) u_i = v_t - base_t k_t A.

Substitution inverts all blocks of the diagonal at once. Matrix products handle
the coupling between blocks. Two alternatives were rejected. Powers of the
matrix grow like binomials when keys repeat, and cancel. XLA's own solve on a
CPU is LAPACK's, whose threads wait for each other on small systems (6 times
slower here on a busy machine).
"""

import functools

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, derivative

_BLOCK = 16  # rows of a diagonal block


def _solve(coupling: jax.Array, target: jax.Array) -> jax.Array:
  """Returns u with u_t + sum_{i < t} coupling_{t,i} u_i = target_t.

  Args:
    coupling: `[..., time, time]`, float32 or wider; only its strict lower
      triangle is read.
    target: `[..., time, value]`, of the same dtype and leading axes.
  """
  product = functools.partial(
    contract.product, "...ti,...iv->...tv", dtype=target.dtype
  )
  time = target.shape[-2]
  starts = range(0, time, _BLOCK)
  inverses = _inverse(_diagonal_blocks(coupling))
  parts = []
  for i, start in enumerate(starts):
    end = min(start + _BLOCK, time)
    rest = target[..., start:end, :]
    if parts:
      earlier = coupling[..., start:end, :start]
      rest = rest - product(earlier, jnp.concatenate(parts, axis=-2))
    size = end - start
    parts.append(product(inverses[..., i, :size, :size], rest))
  return jnp.concatenate(parts, axis=-2)


def _diagonal_blocks(x: jax.Array) -> jax.Array:
  """Cuts `[..., time, time]` to `[..., blocks, rows, rows]`, zero-padded."""
  time = x.shape[-1]
  size = min(_BLOCK, time)
  padding = -time % size
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding)] * 2)
  starts = range(0, time, size)
  return jnp.stack(
    [x[..., s : s + size, s : s + size] for s in starts], axis=-3
  )


def _inverse(x: jax.Array) -> jax.Array:
  """Returns the inverse of I + strict(x), `[..., rows, rows]`, row by row."""
  size = x.shape[-1]
  unit = jnp.eye(size, dtype=x.dtype)
  rows = [jnp.broadcast_to(unit[0], x[..., 0, :].shape)]
  for t in range(1, size):
    known = jnp.stack(rows, axis=-2)
    rows.append(unit[t] - jnp.sum(x[..., t, :t, None] * known, axis=-2))
  return jnp.stack(rows, axis=-2)


def _forward(coupling, target):
  u = _solve(coupling, target)
  return u, (coupling, u)


def _backward(residuals, d_u):
  coupling, u = residuals
  # The transposed system runs from the last token to the first.
  transposed = jnp.flip(jnp.swapaxes(coupling, -1, -2), (-1, -2))
  d_target = jnp.flip(_solve(transposed, jnp.flip(d_u, -2)), -2)
  pairs = contract.product("...tv,...iv->...ti", d_target, u, u.dtype)
  return -jnp.tril(pairs, -1), d_target


solve = derivative.custom_vjp(_solve, _forward, _backward)
