"""Activations over the slot axis (the last), and their write directions.

`eps` is inside the root of the layer norm and of the L2 norm; the other
activations ignore it. It bounds the norms' Jacobian by about 1 / sqrt(eps). For
`phi` it is therefore part of the model and not only a safeguard. It is a
number, or an array that broadcasts against one activation's row, `[..., 1]`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


def layer_norm(x: jax.Array, eps: ArrayLike) -> jax.Array:
  """Applies a layer norm over the last axis, without parameters."""
  centred = x - jnp.mean(x, axis=-1, keepdims=True)
  variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
  return centred * lax.rsqrt(variance + eps)


def l2_norm(x: jax.Array, eps: ArrayLike) -> jax.Array:
  """Returns x / sqrt(|x|^2 + eps) over the last axis; gradients are finite."""
  return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def unit(x: jax.Array) -> jax.Array:
  """L2-normalises the last axis in float32 or wider, and casts back."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return l2_norm(wide, 1e-6).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array, ArrayLike], jax.Array]] = {
  "ln_silu": lambda x, eps: layer_norm(jax.nn.silu(x), eps),
  "l2_silu": lambda x, eps: l2_norm(jax.nn.silu(x), eps),
  "silu": lambda x, eps: jax.nn.silu(x),
  "l2": l2_norm,
  "softmax": lambda x, eps: jax.nn.softmax(x, axis=-1),
  "identity": lambda x, eps: x,
}

# The derivative of silu is at most this (1.0998, at 2.4).
_SILU = 1.0999

# The Jacobian's operator norm is at most factor * eps ** power. A layer norm
# projects, then divides by at least sqrt(eps); an L2 norm does the same. The
# softmax's diag(p) - p p^T is largest when two entries have half the mass each.
_STEEPNESS: dict[str, tuple[float, float]] = {
  "ln_silu": (_SILU, -0.5),
  "l2_silu": (_SILU, -0.5),
  "silu": (_SILU, 0.0),
  "l2": (1.0, -0.5),
  "softmax": (0.5, 0.0),
  "identity": (1.0, 0.0),
}


def activate(name: str, x: jax.Array, eps: ArrayLike) -> jax.Array:
  """Applies the activation called `name` over the last axis of `x`."""
  return ACTIVATIONS[name](x, eps)


def steepness(name: str, eps: jax.Array | float) -> jax.Array | float:
  """Returns a bound on the operator norm of the Jacobian at any point.

  Args:
    name: name of the activation.
    eps: eps of its norm, > 0.

  Returns:
    The bound, with the type and shape of `eps`.
  """
  factor, power = _STEEPNESS[name]
  return factor * eps**power


def write_direction(
  name: str, pre_activation: jax.Array, target: jax.Array, eps: ArrayLike
) -> jax.Array:
  """Returns u = J_phi(z)^T (phi(z) - target), the gradient of half the loss.

  Args:
    name: name of the activation phi.
    pre_activation: z, `[..., slots]`.
    target: `[..., slots]`.
    eps: eps of phi.

  Returns:
    `[..., slots]`: the gradient of |phi(z) - target|^2 / 2 with respect to z.
  """
  output, vjp = jax.vjp(lambda z: activate(name, z, eps), pre_activation)
  return vjp(output - target)[0]
