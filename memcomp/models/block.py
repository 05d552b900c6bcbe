"""A pre-norm residual block: a sequence mixer, then a channel mixer."""

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from memcomp import sharding
from memcomp.layers import mlp, norm
from memcomp.models import registry


class Block(nnx.Module):
  """x + mixer(norm(x)), then x + mlp(norm(x)).

  Args:
    config: a `DecoderConfig`.
    rngs: random streams.
  """

  def __init__(self, config: Any, *, rngs: nnx.Rngs):
    # Residual branches add up over depth: their last weights start smaller.
    out_std = config.init_std / (2 * config.num_layers) ** 0.5
    self.mixer_norm = norm.RMSNorm(config.d_model)
    self.mixer = registry.module_of(config.mixer)(
      config.mixer,
      config.d_model,
      std=config.init_std,
      out_std=out_std,
      rngs=rngs,
    )
    self.mlp_norm = norm.RMSNorm(config.d_model)
    self.mlp = mlp.SwiGLU(
      config.d_model,
      config.mlp_dim,
      std=config.init_std,
      out_std=out_std,
      rngs=rngs,
    )

  def __call__(self, x, state, *, segment_ids=None, positions=None):
    """`[batch, time, d_model]` -> the same, and the mixer's new state."""
    y, state = self.mixer(
      self.mixer_norm(x), state, segment_ids=segment_ids, positions=positions
    )
    x = _residual(x, checkpoint_name(y, "mixer_out"))
    return _residual(x, self.mlp(self.mlp_norm(x))), state

  def step(self, x, state):
    """One token: `[batch, d_model]`."""
    y, state = self.mixer.step(self.mixer_norm(x), state)
    x = x + y
    return x + self.mlp(self.mlp_norm(x)[:, None])[:, 0], state


def _residual(x: jax.Array, y: jax.Array) -> jax.Array:
  # Without this the partitioner spreads activations over features.
  return sharding.constrain(x + y, "batch", "time", "act_embed")
