"""The layer norm LN_s, and lengths of vectors that may be zero."""

import jax
import jax.numpy as jnp

from memcomp_kernels.math import activations


def layer_norm(
  x: jax.Array, *, scale: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
  """Applies LN_s over the last axis; `scale` and `bias` broadcast with `x`."""
  return activations.layer_norm(x, eps) * scale + bias


def length(x: jax.Array) -> jax.Array:
  """Returns the L2 norm over the last axis, with zero gradient at zero."""
  squared = jnp.sum(x * x, axis=-1)
  some = squared > 0
  return jnp.where(some, jnp.sqrt(jnp.where(some, squared, 1)), 0)
