"""RMS norm and layer norm over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from memcomp.layers import linear

EPS = 1e-6


class RMSNorm(nnx.Module):
  """x / rms(x) * scale.

  Args:
    dim: number of features.
    name: logical name of the scale's axis.
    eps: added to the mean square.
    groups: number of equal parts of x with separate rms.
  """

  def __init__(
    self,
    dim: int,
    *,
    name: str = "act_embed",
    eps: float = EPS,
    groups: int = 1,
  ):
    self.scale = linear.constant_param(jnp.ones(dim), (name,))
    self.eps = eps
    self.groups = groups

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises `[..., dim]`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    parts = wide.reshape(*x.shape[:-1], self.groups, x.shape[-1] // self.groups)
    square = jnp.mean(parts * parts, axis=-1, keepdims=True)
    unit = (parts * lax.rsqrt(square + self.eps)).reshape(x.shape)
    return (unit * self.scale[...]).astype(x.dtype)


class LayerNorm(nnx.Module):
  """(x - mean) / std * scale + bias; `eps` is added to the variance."""

  def __init__(self, dim: int, *, name: str = "act_embed", eps: float = EPS):
    self.scale = linear.constant_param(jnp.ones(dim), (name,))
    self.bias = linear.constant_param(jnp.zeros(dim), (name,))
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises `[..., dim]`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    y = wide * lax.rsqrt(square + self.eps) * self.scale[...] + self.bias[...]
    return y.astype(x.dtype)


NORMS = {"rms": RMSNorm, "layer": LayerNorm}
"""Norms by name."""
