"""Activations and write directions with slots on sublanes.

These are the functions of `math.activations` for arrays `[slots, tokens]`: each
column is a token. Callers pass half the pre-activation, z / 2, because
sigmoid(z) = (1 + tanh(z / 2)) / 2 costs one transcendental and no reciprocal.

Layer norm and L2 norm share one form. For layer norm (or L2 norm), let

  s = silu(z) (or z),             c = s minus its mean (or s),
  k = sqrt(slots) (or 1),         r = rsqrt(|c|^2 + k^2 eps).

The activation is k r c. Its transposed Jacobian maps e = k r c - alpha to

  silu'(z) * k r (B c - alpha'),   B = r^2 (k^3 eps r + alpha' . c)

where alpha' is alpha minus its mean (or alpha).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax


def _sum(x: jax.Array) -> jax.Array:
  return jnp.sum(x, axis=0, keepdims=True)


def _centred(name: str, x: jax.Array) -> jax.Array:
  if name != "ln_silu":
    return x
  return x - _sum(x) * (1.0 / x.shape[0])


def _silu(half: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns silu(z) and twice its derivative."""
  tanh = jnp.tanh(half)
  twice = 1.0 + tanh  # 2 sigmoid
  silu = half * twice
  return silu, twice + silu * (1.0 - tanh)


def _pre(name: str, half: jax.Array):
  """Returns what the norm takes, and twice its derivative (None if it is 1)."""
  if name.endswith("silu"):
    return _silu(half)
  return 2.0 * half, None


def _scale(name: str, slots: int) -> float:
  return math.sqrt(slots) if name == "ln_silu" else 1.0


def prepare_target(name: str, target: jax.Array) -> jax.Array:
  """Converts targets, float32 `[slots, tokens]`, for `direction`."""
  return _centred(name, target)


def activate(
  name: str, half: jax.Array, eps: jax.Array | float, scale: jax.Array | float
) -> jax.Array:
  """Returns `scale` times the activation at z = 2 `half`.

  Args:
    name: Name of the activation.
    half: Half the pre-activation, `[slots, tokens]`.
    eps: Epsilon of the norm: a number, or `[1, tokens]`.
    scale: Factor of the result: a number, or `[1, tokens]`.
  """
  if name == "softmax":
    z = 2.0 * half
    weights = jnp.exp(z - jnp.max(z, axis=0, keepdims=True))
    return weights * (scale / _sum(weights))
  s, _ = _pre(name, half)
  if name in ("silu", "identity"):
    return s * scale
  c = _centred(name, s)
  k = _scale(name, half.shape[0])
  return c * (lax.rsqrt(_sum(c * c) + k * k * eps) * (k * scale))


def rate_scale(name: str, slots: int) -> float:
  """Returns the constant that callers of `direction` multiply rates with.

  Callers apply it once, so that `direction` saves the multiplications.
  """
  slope = 0.5 if name.endswith("silu") else 1.0  # `_silu` doubles its slope
  return 0.5 * slope * _scale(name, slots)


def direction(
  name: str,
  half: jax.Array,
  target: jax.Array,
  eps: jax.Array | float,
  rate: jax.Array,
) -> jax.Array:
  """Returns half of rate * J^T (phi(z) - target) at z = 2 `half`.

  Args:
    name: Name of the activation phi.
    half: Half the pre-activation, `[slots, tokens]`.
    target: Result of `prepare_target`.
    eps: Epsilon of phi: a number, or `[1, tokens]`.
    rate: Rate times `rate_scale`, `[1, tokens]`.
  """
  if name == "softmax":
    p = activate(name, half, eps, 1.0)
    e = p - target
    return p * (e - _sum(p * e)) * rate
  s, slope = _pre(name, half)
  if name in ("silu", "identity"):
    u = (s - target) * rate
    return u if slope is None else u * slope
  c = _centred(name, s)
  k = _scale(name, half.shape[0])
  r = lax.rsqrt(_sum(c * c) + k * k * eps)
  b = r * r * (k**3 * eps * r + _sum(target * c))
  u = (c * b - target) * (r * rate)
  return u if slope is None else slope * u
