"""Linear maps and their initialisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding


def normal_param(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  names: tuple[str | None, ...],
  *,
  std: float,
  weight_decay: bool = True,
) -> nnx.Param:
  """A parameter ~ N(0, std^2) whose axes carry logical `names`."""
  value = std * jax.random.normal(rngs.params(), shape)
  return nnx.Param(value, out_sharding=names, weight_decay=weight_decay)


def constant_param(
  value: jax.Array, names: tuple[str | None, ...]
) -> nnx.Param:
  """A parameter that starts at `value` and is not decayed."""
  return nnx.Param(value, out_sharding=names, weight_decay=False)


class Linear(nnx.Module):
  """y = x W (+ b), in the input's dtype.

  Args:
    in_dim: features of x.
    out_dim: features of y.
    names: logical names of W's two axes.
    std: of W at the start.
    bias: constant that b starts from; None for no bias.
    rngs: random streams.
  """

  def __init__(
    self,
    in_dim: int,
    out_dim: int,
    names: tuple[str | None, str | None],
    *,
    std: float,
    bias: float | None = None,
    rngs: nnx.Rngs,
  ):
    self.kernel = normal_param(rngs, (in_dim, out_dim), names, std=std)
    self.bias = nnx.data(None)
    if bias is not None:
      self.bias = constant_param(jnp.full(out_dim, bias), names[1:])

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `[..., in_dim]` to `[..., out_dim]`."""
    y = x @ self.kernel[...].astype(x.dtype)
    if self.bias is not None:
      y = y + self.bias[...].astype(x.dtype)
    return y


def split_heads(x: jax.Array, heads: int) -> jax.Array:
  """`[batch, time, heads * dim]` to `[batch, time, heads, dim]`."""
  x = x.reshape(*x.shape[:-1], heads, -1)
  return sharding.constrain(x, "batch", "time", "heads", None)
