"""Step sizes of state space models, and their decays.

  dt = softplus(x + bias),    log decay = -exp(rate_log) dt

for every head (Mamba2, arXiv 2405.21060). Gated DeltaNet uses the decay only.
`rate_log` and `bias` are `A_log` and `dt_bias` of the released layers.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp.layers import linear

# Range of the initial steps, which are uniform in log scale.
STEPS = 1e-3, 1e-1

# A rate of e^30 forgets everything at any relevant step. The exp of larger logs
# could be infinite, and infinity times a step or gradient of zero is nan.
_LARGEST_LOG = 30.0


class StepSize(nnx.Module):
  """The parameters of the formula above.

  Args:
    heads: number of heads.
    smallest_rate: lower bound of the uniform initial exp(rate_log), > 0.
    largest_rate: upper bound of the uniform initial exp(rate_log).
    rngs: random streams.
  """

  def __init__(
    self,
    heads: int,
    *,
    smallest_rate: float,
    largest_rate: float,
    rngs: nnx.Rngs,
  ):
    rate = jax.random.uniform(
      rngs.params(), (heads,), minval=smallest_rate, maxval=largest_rate
    )
    low, high = (math.log(step) for step in STEPS)
    step = jnp.exp(
      jax.random.uniform(rngs.params(), (heads,), minval=low, maxval=high)
    )
    # Inverse of softplus: softplus(bias) is the step.
    bias = step + jnp.log(-jnp.expm1(-step))
    self.rate_log = linear.constant_param(jnp.log(rate), ("heads",))
    self.bias = linear.constant_param(bias, ("heads",))

  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maps `[..., heads]` to steps > 0 and log decays < 0, float32 or wider."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    step = jax.nn.softplus(x + self.bias[...])
    rate = jnp.exp(jnp.minimum(self.rate_log[...], _LARGEST_LOG))
    return step, -rate * step
