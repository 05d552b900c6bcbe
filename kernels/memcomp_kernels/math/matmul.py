"""Matrix products with explicit rounding."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
"""`jnp.einsum` that does not round float32 to bfloat16, a TPU's default.

Definitions use it, and choices that rounding would change.
"""


def product(equation: str, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
  """Multiplies operands cast to `dtype`, and sums in float32 or wider."""
  # bfloat16 operands take one pass of a matrix unit. A TPU would by default
  # round float32 operands to bfloat16, so they ask for the highest precision.
  precision = (
    lax.Precision.DEFAULT if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
  )
  return jnp.einsum(
    equation,
    a.astype(dtype),
    b.astype(dtype),
    precision=precision,
    preferred_element_type=jnp.promote_types(dtype, jnp.float32),
  )
