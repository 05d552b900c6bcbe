"""Channel mixers.

  y, state = mixer(x, state, segment_ids=, segment_id=, rules=)

A channel mixer has a state only if it has a token shift; otherwise it is None.
"""

import jax
from flax import nnx

from memcomp.layers import linear, token_shift


class SwiGLU(nnx.Module):
  """(SiLU(x W_gate) * x W_up) W_down.

  Args:
    d_model: number of input and output features.
    hidden: number of hidden features.
    std: initial standard deviation of the weights.
    out_std: initial standard deviation of W_down.
    rngs: random streams.
  """

  def __init__(
    self, d_model: int, hidden: int, *, std: float, out_std: float, rngs
  ):
    into, out = ("embed", "mlp"), ("mlp", "embed")
    self.gate = linear.Linear(d_model, hidden, into, std=std, rngs=rngs)
    self.up = linear.Linear(d_model, hidden, into, std=std, rngs=rngs)
    self.down = linear.Linear(hidden, d_model, out, std=out_std, rngs=rngs)

  def init_state(self, batch: int) -> None:
    """Returns None: there is no state."""

  def __call__(self, x: jax.Array, state: None, *, rules, **context):
    """Maps `[batch, time, d_model]` to the same shape."""
    hidden = jax.nn.silu(self.gate(x)) * self.up(x)
    return self.down(rules.constrain(hidden, "batch", "time", "mlp")), state


class GELU(nnx.Module):
  """GELU(x W_up) W_down, with the arguments of `SwiGLU`."""

  def __init__(
    self, d_model: int, hidden: int, *, std: float, out_std: float, rngs
  ):
    into, out = ("embed", "mlp"), ("mlp", "embed")
    self.up = linear.Linear(d_model, hidden, into, std=std, rngs=rngs)
    self.down = linear.Linear(hidden, d_model, out, std=out_std, rngs=rngs)

  def init_state(self, batch: int) -> None:
    """Returns None: there is no state."""

  def __call__(self, x: jax.Array, state: None, *, rules, **context):
    """Maps `[batch, time, d_model]` to the same shape."""
    hidden = jax.nn.gelu(self.up(x))
    return self.down(rules.constrain(hidden, "batch", "time", "mlp")), state


class SquaredReLU(nnx.Module):
  """ReLU(shift(x) W_up)^2 W_down, the channel mixer of RWKV-7 and GPTAlpha-2.

  The arguments are those of `SwiGLU`, but W_up always starts orthogonal. The
  state is the input of the last token for the token shift. The first token is
  shifted towards zeros.
  """

  def __init__(
    self, d_model: int, hidden: int, *, std: float, out_std: float, rngs
  ):
    into, out = ("embed", "mlp"), ("mlp", "embed")
    self.shift = token_shift.TokenShift(
      d_model, exponent=1.0, power=4, first="zero"
    )
    self.up = linear.Linear(
      d_model,
      hidden,
      into,
      std=max(d_model, hidden) ** -0.5,
      init="orthogonal",
      rngs=rngs,
    )
    self.down = linear.Linear(hidden, d_model, out, std=out_std, rngs=rngs)

  def at_depth(self, depth: jax.Array, layers: int) -> None:
    """Reinitializes for a layer at `depth` in [0, 1)."""
    del layers
    self.shift.at_depth(depth)

  def init_state(self, batch: int) -> jax.Array:
    """The state before the first token."""
    return self.shift.init_state(batch)

  def __call__(self, x: jax.Array, state: jax.Array, *, rules, **context):
    """Maps `[batch, time, d_model]` to the same shape."""
    x, state = self.shift(x, state, rules=rules, **context)
    hidden = jax.nn.relu(self.up(x)) ** 2
    return self.down(rules.constrain(hidden, "batch", "time", "mlp")), state


CHANNEL_MIXERS = {"swiglu": SwiGLU, "gelu": GELU, "relu2_shift": SquaredReLU}
"""Channel mixers by name."""
