"""The channel mixer."""

import jax
from flax import nnx

from memcomp import sharding
from memcomp.layers import linear


class SwiGLU(nnx.Module):
  """(SiLU(x W_gate) * x W_up) W_down.

  Args:
    d_model: features in and out.
    hidden: features between.
    std: of the weights at the start.
    out_std: of W_down at the start.
    rngs: random streams.
  """

  def __init__(
    self, d_model: int, hidden: int, *, std: float, out_std: float, rngs
  ):
    into, out = ("embed", "mlp"), ("mlp", "embed")
    self.gate = linear.Linear(d_model, hidden, into, std=std, rngs=rngs)
    self.up = linear.Linear(d_model, hidden, into, std=std, rngs=rngs)
    self.down = linear.Linear(hidden, d_model, out, std=out_std, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `[batch, time, d_model]` to the same shape."""
    hidden = jax.nn.silu(self.gate(x)) * self.up(x)
    return self.down(sharding.constrain(hidden, "batch", "time", "mlp"))
