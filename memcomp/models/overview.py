"""Sizes and costs of a config, without building its model."""

from memcomp.layers import registry
from memcomp.models import decoder_config

DecoderConfig = decoder_config.DecoderConfig


def memory_flops_per_token(config: DecoderConfig, length: int) -> int:
  """Forward flops of all memories per token.

  The mean over sequences of `length` tokens.
  """
  return sum(mixer.memory_flops(length) for mixer in config.layer_mixers())


def state_bytes(config: DecoderConfig, length: int) -> int:
  """Bytes of all float32 memories per sequence of `length` tokens."""
  return 4 * sum(mixer.state_floats(length) for mixer in config.layer_mixers())


def mixer_names(config: DecoderConfig) -> str:
  """The mixers in use, with the pattern if there are several."""
  used = set(config.layer_names())
  kinds = {
    name: registry.name_of(config.mixers[name])
    for name in config.mixers
    if name in used
  }
  if len(kinds) == 1:
    return next(iter(kinds.values()))
  several = (f"{name} {kind}" for name, kind in kinds.items())
  return f"{' + '.join(several)} ({config.pattern})"


def describe(config: DecoderConfig) -> str:
  """Describes mixers and sizes in one line."""
  return (
    f"{mixer_names(config)}, {config.num_layers} layers, d_model"
    f" {config.d_model}, vocabulary {config.vocab_size}"
  )
