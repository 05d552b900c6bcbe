"""What a configuration comes to, without building its model."""

from memcomp.layers import registry
from memcomp.models import decoder_config
from memcomp.models import pattern as pattern_lib

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
  """The mixers' names, "a" first, with the pattern where there are several."""
  letters = pattern_lib.letters(config.pattern, config.num_layers)
  names = [registry.name_of(config.mixer_of(x)) for x in sorted(set(letters))]
  several = f" ({config.pattern})" if len(names) > 1 else ""
  return " + ".join(names) + several


def describe(config: DecoderConfig) -> str:
  """One line: mixers and sizes."""
  return (
    f"{mixer_names(config)}, {config.num_layers} layers, d_model"
    f" {config.d_model}, vocabulary {config.vocab_size}"
  )
