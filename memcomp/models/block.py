"""A pre-norm residual block: a sequence mixer, then a channel mixer."""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from memcomp import sharding
from memcomp.layers import base, mlp, norm, options, registry
from memcomp_kernels.math import solver


class BlockState(NamedTuple):
  """States of the sequence mixer and of the channel mixer (or None)."""

  mixer: Any
  channel: jax.Array | None


class Parts(NamedTuple):
  """The mixer's input and output, and how its systems were solved (or None)."""

  given: jax.Array
  mixed: jax.Array
  stats: solver.Stats | None


class Block(nnx.Module):
  """x + c mixer(norm(x)), then x + c channel_mixer(norm(x)).

  Args:
    config: a `DecoderConfig`.
    mixer: config of this block's sequence mixer.
    depth: fraction of the model's layers that precede this block.
    rngs: random streams.
    rules: map logical axes to mesh axes.
  """

  def __init__(
    self,
    config: Any,
    mixer: options.MixerConfig,
    depth: jax.Array,
    *,
    rngs: nnx.Rngs,
    rules: sharding.Rules,
  ):
    self.rules = rules
    # Residual branches add up over depth, so their last weights start smaller.
    out_std = config.init_std / (2 * config.num_layers) ** 0.5
    if config.zero_init_out:
      out_std = 0.0
    new_norm = functools.partial(norm.NORMS[config.norm], eps=config.norm_eps)
    self.mixer_norm = new_norm(config.d_model)
    self.mixer = registry.module_of(mixer).from_config(
      mixer,
      config.d_model,
      std=config.init_std,
      out_std=out_std,
      rngs=rngs,
      rules=rules,
    )
    self.uses_first_value = mixer.uses_first_value
    self.mlp_norm = new_norm(config.d_model)
    self.mlp = mlp.CHANNEL_MIXERS[config.channel_mixer](
      config.d_model,
      config.mlp_dim,
      std=config.init_std,
      out_std=out_std,
      rngs=rngs,
    )
    for module in (self.mixer, self.mlp):
      if hasattr(module, "at_depth"):
        module.at_depth(depth, config.num_layers)
    self.residual_scale = config.residual_scale

  def init_state(self, batch: int, length: int | None = None) -> BlockState:
    """The state before the first token."""
    return BlockState(
      self.mixer.init_state(batch, length), self.mlp.init_state(batch)
    )

  def first_value(self, x: jax.Array) -> jax.Array:
    """The values for later layers' value residuals, at the embeddings `x`."""
    return self.mixer.value_of(self.mixer_norm(x))

  def __call__(self, x, state, call: base.Call, segment_id):
    """Maps `[batch, time, d_model]` to the same shape; returns the new state.

    `segment_id` is that of the decoder's state, before the first token.
    """
    return self.with_parts(x, state, call, segment_id)[:2]

  def with_parts(self, x, state, call: base.Call, segment_id):
    """Like a call; also returns what only some callers ask for."""
    given = self.mixer_norm(x)
    self._check_first_value(call)
    mixed, mixer_state, stats = self.mixer.with_stats(
      given, state.mixer, **call._asdict()
    )
    x = self._residual(x, checkpoint_name(mixed, "mixer_out"))
    y, channel = self.mlp(
      self.mlp_norm(x),
      state.channel,
      segment_ids=call.segment_ids,
      segment_id=segment_id,
      rules=self.rules,
    )
    x = self._residual(x, y)
    return x, BlockState(mixer_state, channel), Parts(given, mixed, stats)

  def step(self, x, state, call: base.Call, segment_id):
    """Runs one token, `[batch, d_model]`."""
    self._check_first_value(call)
    y, mixer_state = self.mixer.step(
      self.mixer_norm(x), state.mixer, first_value=call.first_value
    )
    x = x + self.residual_scale * y
    y, channel = self.mlp(
      self.mlp_norm(x)[:, None],
      state.channel,
      segment_ids=None,
      segment_id=segment_id,
      rules=self.rules,
    )
    return x + self.residual_scale * y[:, 0], BlockState(mixer_state, channel)

  def _check_first_value(self, call: base.Call) -> None:
    # Without first_value, the mixer would use its own values: silently another
    # model.
    if self.uses_first_value and call.first_value is None:
      raise ValueError("a block with a value residual needs first_value")

  def _residual(self, x: jax.Array, y: jax.Array) -> jax.Array:
    if self.residual_scale != 1:
      y = self.residual_scale * y
    # Otherwise the partitioner would shard activations over features.
    return self.rules.constrain(x + y, "batch", "time", "act_embed")
