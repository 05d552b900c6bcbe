"""`primitives.activations` on rows in registers: `[tokens, slots]`, float32.

By formulas, not by `jax.vjp`: a kernel has no rows of one column.
"""

import jax
import jax.numpy as jnp
from jax import lax

NAMES = ("ln_silu", "l2_silu", "silu", "l2", "softmax", "identity")


def along_rows(x: jax.Array, like: jax.Array) -> jax.Array:
  """A number of each row, `[tokens]`, in all its columns."""
  return lax.broadcast_in_dim(x, like.shape, (0,))


def _sum(x: jax.Array) -> jax.Array:
  return along_rows(jnp.sum(x, axis=1), x)


def _silu(z: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns silu(z) and its derivative."""
  gate = 1 / (1 + jnp.exp(-z))
  return z * gate, gate * (1 + z * (1 - gate))


def _normalise(name: str, z: jax.Array, eps: float):
  """Returns phi(z), the reciprocal that it was divided with, and d s / d z."""
  s, slope = _silu(z) if name.endswith("silu") else (z, None)
  count = 1
  if name == "ln_silu":
    count = z.shape[1]
    s = s - _sum(s) * (1 / count)
  inverse = None
  if name in ("ln_silu", "l2_silu", "l2"):
    inverse = lax.rsqrt(_sum(s * s) * (1 / count) + eps)
    s = s * inverse
  return s, inverse, slope


def activate(name: str, z: jax.Array, eps: float) -> jax.Array:
  """Returns the activation called `name`; `eps` as in `activations`."""
  if name == "softmax":
    weights = jnp.exp(z - along_rows(jnp.max(z, axis=1), z))
    return weights / _sum(weights)
  return _normalise(name, z, eps)[0]


def write_direction(
  name: str, z: jax.Array, target: jax.Array, eps: float
) -> jax.Array:
  """Returns J_phi(z)^T (phi(z) - target), as `activations.write_direction`."""
  if name == "softmax":
    p = activate(name, z, eps)
    error = p - target
    return p * (error - _sum(p * error))
  s, inverse, slope = _normalise(name, z, eps)
  error = s - target
  if inverse is not None:
    along = s * _sum(error * s)
    if name == "ln_silu":
      share = 1 / z.shape[1]
      error = error - _sum(error) * share
      along = along * share
    error = (error - along) * inverse
  return error if slope is None else error * slope
