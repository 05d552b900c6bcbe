"""Matrix products whose rounding is chosen."""

import jax
import jax.numpy as jnp
from jax import lax


def product(equation: str, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
  """A matrix product of `dtype` operands, summed in float32 or wider."""
  # bfloat16 operands are one pass of a matrix unit. float32 ones would be
  # rounded to bfloat16 by default on a TPU: whoever hands in float32 wants it.
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
