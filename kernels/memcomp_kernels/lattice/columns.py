"""Norms and directions of the slots, the columns of S `[..., value, slots]`.

A column with a squared norm below `TINY` has no direction except what rounding
gives it. Every rule here handles such a column, with finite gradients.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
  from memcomp_kernels.lattice import reference

# Bound of a squared norm whose inverse root has a finite float32 derivative.
TINY = 1e-20


def squared_norms(S: jax.Array) -> jax.Array:
  """Reduces `[..., value, slots]` to `[..., 1, slots]`."""
  return jnp.sum(S * S, axis=-2, keepdims=True)


def normalize(S: jax.Array, fallback: jax.Array) -> jax.Array:
  """Normalises columns; takes `fallback`'s where a column has no direction."""
  squares = squared_norms(S)
  sized = squares > TINY
  return jnp.where(sized, S * lax.rsqrt(jnp.where(sized, squares, 1)), fallback)


def soft_threshold(S: jax.Array, threshold: jax.Array) -> jax.Array:
  """Moves entries to zero by at most `threshold`; eq. 18's proximal step.

  A column that would become zero stays as it is. A zero column has no
  direction, so no later token could write to it along its tangent.
  """
  smaller = S - jnp.clip(S, -threshold, threshold)
  wiped = jnp.all(smaller == 0, axis=-2, keepdims=True)
  return jnp.where(wiped, S, smaller)


def directions(
  S: jax.Array, spec: "reference.Spec"
) -> tuple[jax.Array, jax.Array]:
  """Returns Phi, at which the loss is taken, and the norms to divide by.

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

  It is 1 where nothing of a column remains.

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
  """Applies what follows a write: the proximal step, then renormalisation.

  Args:
    S: the memory after the write, `[..., value, slots]`.
    fallback: provides the direction of columns that have none.
    rate: `[...]`, sum of write rates since the last call; read only with
      sparsity.
    spec: the memory's options.
  """
  if spec.sparsity and rate is not None:
    S = soft_threshold(S, spec.sparsity * rate[..., None, None])
  return normalize(S, fallback) if spec.unit_columns else S
