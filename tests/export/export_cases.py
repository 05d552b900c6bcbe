"""The experiment whose run is exported."""

from memcomp import config as config_lib
from memcomp.layers import trellis
from memcomp.models import decoder


def tiny_config(**data) -> config_lib.Config:
  config = config_lib.Config(
    name="tiny",
    model=decoder.DecoderConfig(
      d_model=32,
      num_layers=2,
      mlp_dim=48,
      embedding_convolution=4,
      mixers={
        "memory": trellis.TrellisConfig(
          heads=2, key_dim=8, value_dim=8, num_slots=8, chunk_size=8
        )
      },
    ),
    data=config_lib.DataConfig(sequence_length=32, **data),
  )
  config.evaluation.lengths, config.evaluation.rows = 2, 2
  config.evaluation.sample_tokens = 8
  return config
