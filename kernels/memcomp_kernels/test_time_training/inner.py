"""The inner model over rows of tokens: answers and gradients in closed form.

A layer is x W + b, GELU stands between two of them, and the loss is

  l = |LN(z) - target|^2 / 2,   LN(z) = scale * h + bias,
  h = (z - mean z) / s,         s = sqrt(var z + eps)

with z the last layer's rows and target = v - k. With g = dl / dh,

  dl/dz = (g - mean(g) - h mean(g h)) / s,   g = scale * (LN(z) - target)

the gradient that the weights of the last layer see beside their input; that
of an earlier one has passed through the next layer's W and through GELU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.math import activations


class Labels(NamedTuple):
  """What z is compared with.

  Attributes:
    target: v - k, `[..., dim]`.
    scale: weight of the layer norm, `[..., dim]`.
    bias: its bias.
  """

  target: jax.Array
  scale: jax.Array
  bias: jax.Array


def norm(
  z: jax.Array, scale: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
  """LN(z) over the last axis."""
  return scale * activations.layer_norm(z, eps) + bias


def gradient(eps: float, z: jax.Array, labels: Labels) -> jax.Array:
  """Returns dl / dz, `[..., dim]`."""
  centred = z - jnp.mean(z, axis=-1, keepdims=True)
  variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
  inverse = lax.rsqrt(variance + eps)
  h = centred * inverse
  g = labels.scale * (labels.scale * h + labels.bias - labels.target)
  along = jnp.mean(g * h, axis=-1, keepdims=True)
  return inverse * (g - jnp.mean(g, axis=-1, keepdims=True) - h * along)


def gelu(z: jax.Array) -> tuple[jax.Array, jax.Array]:
  """GELU (tanh form), and its derivative."""
  return jax.jvp(jax.nn.gelu, (z,), (jnp.ones_like(z),))
