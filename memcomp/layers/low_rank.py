"""Low-rank linear maps, with ranks and initial values of released RWKV-7."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import linear


def released_rank(d_model: int, factor: float) -> int:
  """The multiple of 32 that is nearest to factor sqrt(d_model), at least 32."""
  return max(32, 32 * round(factor * math.sqrt(d_model) / 32))


def ramp(width: int) -> jax.Array:
  """Evenly spaced numbers from 0 to 1, one number per channel."""
  return jnp.arange(width) / max(width - 1, 1)


def value_share_bias(width: int) -> jax.Array:
  """The initial logit of a value residual's weight, by channel."""
  return 0.73 - 0.4 * (ramp(width) - 0.5)


def pair(
  in_dim: int, rank: int, out_dim: int, *, rngs: nnx.Rngs
) -> tuple[linear.Linear, linear.Linear]:
  """Returns A and B of x A B; A is zero at first."""
  std = 0.1 / math.sqrt(max(rank, out_dim))
  return (
    linear.Linear(in_dim, rank, ("embed", None), std=0.0, rngs=rngs),
    linear.Linear(
      rank, out_dim, (None, "heads"), std=std, init="orthogonal", rngs=rngs
    ),
  )


class LowRank(nnx.Module):
  """f(x A) B (+ bias); the initial output is the bias.

  Args:
    in_dim: number of input features.
    rank: number of features between A and B.
    out_dim: number of output features.
    activation: f, "tanh" or "sigmoid"; None for the identity. A name, because
      jitted functions cannot be pickled.
    bias: initial bias `[out_dim]`; None for none.
    rngs: random streams.
  """

  def __init__(self, in_dim, rank, out_dim, *, activation=None, bias, rngs):
    self.down, self.up = pair(in_dim, rank, out_dim, rngs=rngs)
    self.bias = nnx.data(None)
    if bias is not None:
      self.bias = linear.constant_param(bias, ("heads",))
    self.activation = activation

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `[..., in_dim]` to `[..., out_dim]`; float32 or wider with bias."""
    y = self.down(x)
    if self.activation is not None:
      y = getattr(jax.nn, self.activation)(y)
    y = self.up(y)
    return y if self.bias is None else y + self.bias[...]
