"""What a configuration comes to, without building its model."""

from memcomp.layers import registry
from memcomp.models import decoder_config

DecoderConfig = decoder_config.DecoderConfig


def memory_flops_per_token(config: DecoderConfig, length: int) -> int:
  """Forward flops of the memories per token, over all layers.

  The mean over sequences of `length` tokens.
  """
  return sum(mixer.memory_flops(length) for mixer in config.layer_mixers())


def state_bytes(config: DecoderConfig, length: int) -> int:
  """Bytes of the float32 memories per sequence of `length`, all layers."""
  return 4 * sum(mixer.state_floats(length) for mixer in config.layer_mixers())


def mixer_names(config: DecoderConfig) -> str:
  """What mixers there are, with the pattern where there are several."""
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
  """One line: mixers and sizes."""
  return (
    f"{mixer_names(config)}, {config.num_layers} layers, d_model"
    f" {config.d_model}, vocabulary {config.vocab_size}"
  )
