"""Every mixer learns the standard library's sources under equal conditions.

  python train.py --config=configs/compare.py:trellis
  python train.py --config=configs/compare.py --each=all --seeds=3
  python eval.py --checkpoint=runs/compare --task=compare

There is one small model per mixer (`memcomp.models.comparison` lists them). All
have the same parameter count, block, bytes, row order and optimizer. Hardware:
2 CPU cores. Time: 2 to 4 minutes per model and seed, so about an hour per seed.
Expected: the table and plot of docs/results/compare.md.
"""

from memcomp import config
from memcomp.models import comparison

NAMES = comparison.NAMES


def get_config(name: str = "trellis") -> config.Config:
  """Returns the experiment of the mixer called `name`."""
  return config.Config(
    name=f"compare-{name}",
    model=comparison.language_model(name),
    data=config.DataConfig(
      source="stdlib", validation_share=0.03, sequence_length=512
    ),
    optimizer=config.OptimizerConfig(
      learning_rate=4e-3, final_learning_rate=1e-5, warmup_steps=50
    ),
    training=config.TrainingConfig(
      steps=500, batch_size=4, log_every=50, checkpoint_every=250
    ),
    evaluation=config.EvaluationConfig(lengths=8, rows=16, sample_tokens=0),
  )
