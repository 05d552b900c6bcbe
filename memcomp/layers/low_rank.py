"""A low-rank linear map."""

import math

import jax
from flax import nnx

from memcomp.layers import linear


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
    self.down = linear.Linear(in_dim, rank, ("embed", None), std=0.0, rngs=rngs)
    self.up = linear.Linear(
      rank,
      out_dim,
      (None, "heads"),
      std=0.1 / math.sqrt(max(rank, out_dim)),
      init="orthogonal",
      rngs=rngs,
    )
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
