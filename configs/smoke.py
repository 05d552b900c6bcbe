"""A few steps of a very small Trellis: does everything run?

  python train.py --config=configs/smoke.py

Hardware: any. Time: under a minute on one CPU core. Expected: a loss that
falls, an evaluation and a sample that mean nothing.
"""

from memcomp import config
from memcomp.layers import trellis
from memcomp.models import decoder


def get_config() -> config.Config:
  """Returns the experiment."""
  return config.Config(
    name="smoke",
    model=decoder.DecoderConfig(
      vocab_size=256,
      d_model=32,
      num_layers=2,
      mlp_dim=64,
      mixer=trellis.TrellisConfig(
        heads=2, key_dim=16, value_dim=16, num_slots=8, chunk_size=8
      ),
      init_std=0.06,
      embedding_std=0.5,
    ),
    data=config.DataConfig(source="stdlib", sequence_length=64),
    optimizer=config.OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
    training=config.TrainingConfig(
      steps=30, batch_size=4, log_every=10, checkpoint_every=20
    ),
    evaluation=config.EvaluationConfig(lengths=4, rows=2, sample_tokens=40),
  )
