"""Every mixer learns the standard library's sources, on equal terms.

  python train.py --config=configs/compare.py:trellis
  python train.py --config=configs/compare.py --each=all --seeds=3
  python eval.py --checkpoint=runs/compare --task=compare

One small model a mixer (`memcomp.models.comparison` lists them), with as many
parameters, the same block, bytes, order of rows and optimizer. Hardware: 2 CPU
cores. Time: 2 to 4 minutes a model and seed, so about an hour a seed. Expected:
the table and plot of docs/results/compare.md.
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
