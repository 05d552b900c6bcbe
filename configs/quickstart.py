"""A byte-level Trellis learns the standard library's sources.

  python train.py --config=configs/quickstart.py

Hardware: 2 CPU cores, no download. Time: 8 to 15 minutes including evaluation.
Expected: at most 1.76 bits per byte on the validation files. A third of the
rows start from the state that another text left (training.state_passing), so
that the memory learns to read on beyond its window.
"""

from memcomp import config
from memcomp.layers import trellis
from memcomp.models import decoder


def get_config() -> config.Config:
  """Returns the experiment."""
  return config.Config(
    name="quickstart",
    model=decoder.DecoderConfig(
      vocab_size=256,
      d_model=128,
      num_layers=2,
      mlp_dim=384,
      mixers={
        "memory": trellis.TrellisConfig(
          heads=2, num_slots=32, chunk_size=32, convolve_value=True
        )
      },
      embedding_convolution=4,
      init_std=0.06,
      embedding_std=0.2,
      remat="mixer_out",  # faster on a CPU than storing more residuals
    ),
    data=config.DataConfig(source="stdlib", sequence_length=256),
    optimizer=config.OptimizerConfig(
      name="muon",
      learning_rate=5e-3,
      final_learning_rate=1e-5,
      warmup_steps=140,
    ),
    training=config.TrainingConfig(
      steps=4200,
      batch_size=4,
      state_passing=0.35,
      log_every=100,
      checkpoint_every=1000,
    ),
    evaluation=config.EvaluationConfig(lengths=64, byte_models=True),
  )
