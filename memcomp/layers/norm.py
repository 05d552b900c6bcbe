"""RMS norm and layer norm over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from memcomp.layers import linear

EPS = 1e-6


class RMSNorm(nnx.Module):
  """x / rms(x) * scale; `eps` is added to the mean square."""

  def __init__(self, dim: int, *, name: str = "act_embed", eps: float = EPS):
    self.scale = linear.constant_param(jnp.ones(dim), (name,))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises `[..., dim]`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(square + self.eps) * self.scale[...]).astype(
      x.dtype
    )


class LayerNorm(nnx.Module):
  """(x - mean) / std * scale + bias."""

  def __init__(self, dim: int, *, name: str = "act_embed"):
    self.scale = linear.constant_param(jnp.ones(dim), (name,))
    self.bias = linear.constant_param(jnp.zeros(dim), (name,))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises `[..., dim]`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    y = wide * lax.rsqrt(square + EPS) * self.scale[...] + self.bias[...]
    return y.astype(x.dtype)


NORMS = {"rms": RMSNorm, "layer": LayerNorm}
"""Norms by name."""
