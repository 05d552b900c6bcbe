"""`math.activations` on rows in registers: `[tokens, slots]`, float32.

Adjoints are explicit formulas. A kernel cannot hold rows of one column, and it
supports too few of the operations that `jax.vjp` creates.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class _Parts(NamedTuple):
  """Value phi(z) = y and the parts of its Jacobian J.

  J = inverse (I - y y^T / size) P diag(slope). For "ln_silu", P subtracts the
  mean of a row. None stands for ones. For softmax, J = diag(y) - y y^T.
  """

  name: str
  y: jax.Array
  inverse: jax.Array | None = None
  slope: jax.Array | None = None

  @property
  def size(self) -> int:
    return self.y.shape[1] if self.name == "ln_silu" else 1

  def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the dot product of each row, divided by `size`."""
    return _sum(a * b) * (1 / self.size)

  def centred(self, x: jax.Array) -> jax.Array:
    return x - self.dot(x, jnp.ones_like(x)) if self.size > 1 else x

  def along(self, x: jax.Array) -> jax.Array:
    """Returns inverse (I - y y^T / size) x."""
    if self.inverse is None:
      return x
    return self.inverse * (x - self.y * self.dot(self.y, x))

  def sloped(self, x: jax.Array) -> jax.Array:
    return x if self.slope is None else self.slope * x

  def pull(self, d: jax.Array) -> jax.Array:
    """Returns J^T d."""
    if self.name == "softmax":
      return self.y * (d - self.dot(self.y, d))
    return self.sloped(self.centred(self.along(d)))

  def push(self, d: jax.Array) -> jax.Array:
    """Returns J d."""
    if self.name == "softmax":
      return self.pull(d)
    return self.along(self.centred(self.sloped(d)))


def along_rows(x: jax.Array, like: jax.Array) -> jax.Array:
  """Broadcasts one number per row, `[tokens]`, to all columns."""
  return lax.broadcast_in_dim(x, like.shape, (0,))


def _sum(x: jax.Array) -> jax.Array:
  return along_rows(jnp.sum(x, axis=1), x)


def _inverse(x: jax.Array) -> jax.Array:
  """Returns 1 / x for x > 0; a division takes as long as ten products."""
  return lax.square(lax.rsqrt(x))


def _gate(z: jax.Array) -> jax.Array:
  return _inverse(1 + jnp.exp(-z))


def _parts(name: str, z: jax.Array, eps: float) -> _Parts:
  if name == "softmax":
    weights = jnp.exp(z - along_rows(jnp.max(z, axis=1), z))
    return _Parts(name, weights * _inverse(_sum(weights)))
  found = _Parts(name, z)
  if name.endswith("silu"):
    gate = _gate(z)
    found = _Parts(name, z * gate, slope=gate * (1 + z * (1 - gate)))
  if name in ("ln_silu", "l2_silu", "l2"):
    s = found.centred(found.y)
    inverse = lax.rsqrt(found.dot(s, s) + eps)
    found = found._replace(y=s * inverse, inverse=inverse)
  return found


def activate(name: str, z: jax.Array, eps: float) -> jax.Array:
  """Returns the activation called `name`; `eps` as in `math.activations`."""
  return _parts(name, z, eps).y


def activate_adjoint(
  name: str, z: jax.Array, eps: float, d: jax.Array
) -> jax.Array:
  """Returns the adjoint of `z`; `d` is the adjoint of `activate`."""
  return _parts(name, z, eps).pull(d)


def write_direction(
  name: str, z: jax.Array, target: jax.Array, eps: float
) -> jax.Array:
  """Returns J_phi(z)^T (phi(z) - target); see `activations.write_direction`."""
  parts = _parts(name, z, eps)
  return parts.pull(parts.y - target)


def write_direction_adjoint(
  name: str, z: jax.Array, target: jax.Array, eps: float, d: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the adjoints of `z` and `target`; `d` is that of the direction.

  Let e = phi(z) - target. The adjoint of `target` is -J d. That of `z` is
  J^T (J d + g), where g is the gradient of d^T J^T e with respect to y, with e
  fixed. The slope and the inverse also depend on z and add their own terms.
  """
  parts = _parts(name, z, eps)
  y = parts.y
  error = y - target
  pushed = parts.push(d)
  if name == "softmax":
    by_y = error * (d - _sum(y * d)) - d * _sum(y * error)
    return parts.pull(pushed + by_y), -pushed
  by_y, by_inverse = pushed, 0.0
  if parts.inverse is not None:
    w = parts.centred(parts.sloped(d))
    product = parts.dot(y, error)
    by_y = pushed - parts.inverse * (w * product + error * parts.dot(w, y))
    # d inverse = -inverse^2 y / size, and the direction is proportional to it.
    by_inverse = parts.inverse * y * parts.dot(pushed, error)
  dz = parts.sloped(parts.centred(parts.along(by_y) - by_inverse))
  if parts.slope is not None:
    gate = _gate(z)
    curve = gate * (1 - gate) * (2 + z * (1 - 2 * gate))
    dz = dz + curve * d * parts.centred(parts.along(error))
  return dz, -pushed
