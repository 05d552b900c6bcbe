"""Linear maps and their initialisation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import sharding
from memcomp_kernels import contract


def normal_param(
  rngs: nnx.Rngs,
  shape: tuple[int, ...],
  names: tuple[str | None, ...],
  *,
  std: float,
  weight_decay: bool = True,
  init: str = "normal",
) -> nnx.Param:
  """A random parameter of standard deviation `std` with named axes.

  Args:
    rngs: random streams.
    shape: shape of the parameter.
    names: logical name of each axis.
    std: initial root mean square of the entries.
    weight_decay: whether the optimizer decays it.
    init: "normal", "uniform", "orthogonal" (two axes; rows or columns are
      orthogonal, whichever are fewer) or "zeros".
  """
  key = rngs.params()
  if init == "zeros" or std == 0:
    value = jnp.zeros(shape)
  elif init == "uniform":
    value = jax.random.uniform(key, shape, minval=-1.0) * std * math.sqrt(3)
  elif init == "orthogonal":
    # Entries of an orthogonal matrix have mean square 1 / max(shape).
    scale = std * math.sqrt(max(shape))
    value = jax.nn.initializers.orthogonal(scale)(key, shape)
  else:
    value = std * jax.random.normal(key, shape)
  return nnx.Param(value, axes=names, weight_decay=weight_decay)


def constant_param(
  value: jax.Array, names: tuple[str | None, ...]
) -> nnx.Param:
  """A parameter that starts at `value` and has no weight decay."""
  return nnx.Param(value, axes=names, weight_decay=False)


@contract.default_promotion()
def wide_dtype(x: Any) -> Any:
  """The dtype of x, at least float32: that of states and gates."""
  return jnp.promote_types(x.dtype, jnp.float32)


class Linear(nnx.Module):
  """y = x W (+ b), in the input's dtype.

  Args:
    in_dim: number of input features.
    out_dim: number of output features.
    names: logical names of W's two axes.
    std: initial standard deviation of W.
    bias: initial value of every entry of b; None for no bias.
    init: initial distribution of W, see `normal_param`.
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
    init: str = "normal",
    rngs: nnx.Rngs,
  ):
    self.kernel = normal_param(
      rngs, (in_dim, out_dim), names, std=std, init=init
    )
    self.bias = nnx.data(None)
    if bias is not None:
      self.bias = constant_param(jnp.full(out_dim, bias), names[1:])

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `[..., in_dim]` to `[..., out_dim]`."""
    y = x @ self.kernel[...].astype(x.dtype)
    if self.bias is not None:
      y = y + self.bias[...].astype(x.dtype)
    return y


def split_heads(x: jax.Array, heads: int, rules: sharding.Rules) -> jax.Array:
  """Reshapes `[batch, time, heads * dim]` to `[batch, time, heads, dim]`."""
  # Not -1, which reshape cannot infer for an array without rows.
  x = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
  return rules.constrain(x, "batch", "time", "heads", None)


def join_heads(x: jax.Array) -> jax.Array:
  """Reshapes `[..., heads, dim]` to `[..., heads * dim]`."""
  return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def inverse_softplus(x: float) -> float:
  """The inverse of log(1 + e^x) for `x` > 0."""
  return x + math.log(-math.expm1(-x))


def logit(p: float) -> float:
  """The inverse of the sigmoid for `p` in (0, 1)."""
  return math.log(p / (1 - p))
