"""A config file from before mixers had names: mixer, mixer_b and mixer_c."""

from memcomp import config
from memcomp.layers import linear_attention, softmax_attention, trellis
from memcomp.models import decoder


def get_config() -> config.Config:
  experiment = config.Config(
    name="hybrid",
    model=decoder.DecoderConfig(
      d_model=4,
      num_layers=5,
      mlp_dim=4,
      mixer=trellis.TrellisConfig(
        heads=2, key_dim=2, value_dim=2, num_slots=2, chunk_size=8
      ),
      mixer_b=softmax_attention.SoftmaxAttentionConfig(
        heads=2, key_dim=2, value_dim=2, rotary_dim=2, window_size=6
      ),
      mixer_c=linear_attention.LinearAttentionConfig(
        heads=1, key_dim=2, value_dim=2
      ),
      pattern="ba,1*c",
      init_std=0.5,
      embedding_std=0.5,
    ),
    data=config.DataConfig(packing="stream", sequence_length=16),
    optimizer=config.OptimizerConfig(warmup_steps=0),
    training=config.TrainingConfig(steps=2, batch_size=2, carry_state=True),
  )
  experiment.evaluation.run_after_training = False
  return experiment
