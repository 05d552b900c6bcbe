"""Models: a decoder with any mixers, its config and its sizes.

model = Decoder(DecoderConfig(d_model=256, num_layers=4), rngs=nnx.Rngs(0))
logits = model(tokens)                     # [batch, time, vocab_size]
"""

from memcomp.models.decoder import Decoder, DecoderConfig, DecoderState

__all__ = ["Decoder", "DecoderConfig", "DecoderState"]


def __dir__():
  """Names the public part, without the modules that it comes from."""
  return __all__
