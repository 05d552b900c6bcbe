"""Slots are the columns of S: `[..., value, slots]`; their size and direction.

A column shorter than `TINY` (squared) has no direction that rounding has not
made, and every rule here has an answer for it with finite gradients.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
  from memcomp_kernels.lattice import reference

# Of a squared norm; the derivative of its inverse root is finite in float32.
TINY = 1e-20


def squared_norms(S: jax.Array) -> jax.Array:
  """`[..., value, slots]` to `[..., 1, slots]`."""
  return jnp.sum(S * S, axis=-2, keepdims=True)


def normalize(S: jax.Array, fallback: jax.Array) -> jax.Array:
  """Columns over their norms; `fallback`'s where a column has no direction."""
  squares = squared_norms(S)
  sized = squares > TINY
  return jnp.where(sized, S * lax.rsqrt(jnp.where(sized, squares, 1)), fallback)


def soft_threshold(S: jax.Array, threshold: jax.Array) -> jax.Array:
  """Moves every entry to zero by at most `threshold`: eq. 18's proximal step.

  A column of which nothing would be left stays as it is: a zero column has no
  direction, so that no later token could write to it along its tangent.
  """
  smaller = S - jnp.clip(S, -threshold, threshold)
  wiped = jnp.all(smaller == 0, axis=-2, keepdims=True)
  return jnp.where(wiped, S, smaller)


def directions(
  S: jax.Array, spec: "reference.Spec"
) -> tuple[jax.Array, jax.Array]:
  """Returns Phi, at which the loss is taken, and the norms it is divided by.

  "delta" takes the loss on S itself, and "normalized" has unit columns.
  """
  ones = jnp.ones_like(S[..., :1, :])
  if spec.update != "orthogonal":
    return S, ones
  squares = squared_norms(S)
  norms = jnp.sqrt(jnp.where(squares > TINY, squares, ones))
  return S / norms, norms


def contraction(mu: jax.Array, squares: jax.Array) -> jax.Array:
  """Returns beta = (mu^2 + |ds|^2)^(-1/2) of eq. 14 with eq. 16.

  It is 1 where nothing is left of a column.

  Args:
    mu: the decay.
    squares: |ds|^2 of tangent writes.
  """
  total = mu * mu + squares
  sized = total > TINY
  return jnp.where(sized, lax.rsqrt(jnp.where(sized, total, 1)), 1)


def finish(
  S: jax.Array,
  fallback: jax.Array,
  rate: jax.Array | None,
  spec: "reference.Spec",
) -> jax.Array:
  """What follows a write: the proximal step, then renormalisation.

  Args:
    S: after the write, `[..., value, slots]`.
    fallback: where a column takes its direction from if it has none.
    rate: `[...]`, the write rate since the last call; read with sparsity only.
    spec: the memory's meaning.
  """
  if spec.sparsity and rate is not None:
    S = soft_threshold(S, spec.sparsity * rate[..., None, None])
  return normalize(S, fallback) if spec.unit_columns else S
