"""The inner model over rows of tokens: outputs and gradients in closed form.

A layer is x W + b, with GELU between two layers. The loss is

  l = |LN(z) - target|^2 / 2,   LN(z) = scale * h + bias,
  h = (z - mean z) / s,         s = sqrt(var z + eps)

with z the last layer's rows and target = v - k. With g = dl / dh,

  dl/dz = (g - mean(g) - h mean(g h)) / s,   g = scale * (LN(z) - target)

The gradient of the last layer's weights is the outer product of its input with
dl/dz. For an earlier layer, dl/dz first passes through the next layer's W and
through GELU.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.math import activations


class Labels(NamedTuple):
  """What the loss compares z with.

  Attributes:
    target: v - k, `[..., dim]`.
    scale: scale of the layer norm, `[..., dim]`.
    bias: bias of the layer norm, `[..., dim]`.
  """

  target: jax.Array
  scale: jax.Array
  bias: jax.Array


def norm(
  z: jax.Array, scale: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
  """Returns LN(z) over the last axis."""
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
  """Returns GELU (tanh form) and its derivative."""
  return jax.jvp(jax.nn.gelu, (z,), (jnp.ones_like(z),))
