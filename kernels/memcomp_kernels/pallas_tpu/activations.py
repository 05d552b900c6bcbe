"""Activations and write directions over sublanes: `math.activations`.

Columns are tokens: `[slots, tokens]`. Pre-activations come halved, for then
sigmoid(z) = (1 + tanh(z / 2)) / 2 is one transcendental and no reciprocal.

Layer norm and L2 norm share one form. With s = silu(z) (or z), c = s less its
mean (or s), k = sqrt(slots) (or 1) and r = rsqrt(|c|^2 + k^2 eps), the
activation is k r c, and its transposed Jacobian takes e = k r c - alpha to

  silu'(z) * k r (B c - alpha'),   B = r^2 (k^3 eps r + alpha' . c)

with alpha' = alpha less its mean (or alpha).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

NAMES = ("ln_silu", "l2_silu", "silu", "l2", "softmax", "identity")


def _sum(x: jax.Array) -> jax.Array:
  return jnp.sum(x, axis=0, keepdims=True)


def _centred(name: str, x: jax.Array) -> jax.Array:
  if name != "ln_silu":
    return x
  return x - _sum(x) * (1.0 / x.shape[0])


def _silu(half: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns silu(z) and its derivative, twice."""
  tanh = jnp.tanh(half)
  twice = 1.0 + tanh  # 2 sigmoid
  silu = half * twice
  return silu, twice + silu * (1.0 - tanh)


def _pre(name: str, half: jax.Array):
  """What is normalised, and twice its derivative; None for one."""
  if name.endswith("silu"):
    return _silu(half)
  return 2.0 * half, None


def _scale(name: str, slots: int) -> float:
  return math.sqrt(slots) if name == "ln_silu" else 1.0


def prepare_target(name: str, target: jax.Array) -> jax.Array:
  """What `direction` wants of targets, float32 `[slots, tokens]`."""
  return _centred(name, target)


def activate(
  name: str, half: jax.Array, eps: jax.Array | float, scale: jax.Array | float
) -> jax.Array:
  """Returns `scale` times the activation at z = 2 `half`.

  Args:
    name: of the activation.
    half: `[slots, tokens]`.
    eps: a number, or `[1, tokens]`.
    scale: a number, or `[1, tokens]`.
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
  """What `direction` wants rates multiplied with: constants, once for all."""
  slope = 0.5 if name.endswith("silu") else 1.0  # slopes come doubled
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
    name: of phi.
    half: `[slots, tokens]`.
    target: of `prepare_target`.
    eps: of phi, a number or `[1, tokens]`.
    rate: times `rate_scale`, `[1, tokens]`.
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
