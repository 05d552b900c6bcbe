"""A needle in a haystack, to train on: <mixer>, or <mixer>-<needle>.

  python train.py --config=configs/niah.py:key_value_means
  python eval.py --checkpoint=runs/niah-key_value_means --task=niah \
    --contexts=1024,16384 --needles=single_1

<needle> is single_1 (a number in repeated sentences), single_2 (a number in an
essay) or single_3 (a uuid in an essay), in RULER's format with bundled words
and essay (`memcomp.data.synthetic.niah_task`). The default is single_1. This is
a toy: bytes, questions of 1,024 bytes (4,096 in an essay), and a decoder of two
layers of d_model 64 around the mixer. The evaluation covers one, two, four and
eight times the trained length. Hardware: 2 CPU cores. Time: 10 to 20 minutes of
one core. Expected: docs/results/beyond.md; key_value_means recalls 20 to 28 %
of the numbers at the trained length, and still improves (85 % after 2,500
steps).
"""

from memcomp import config
from memcomp.data.synthetic import niah_task
from memcomp.layers import registry
from memcomp.models import small

NAMES = tuple(registry.MIXERS)


def get_config(name: str = "key_value_means") -> config.Config:
  """Returns the experiment of a mixer, with a needle behind a hyphen."""
  mixer, _, needle = name.partition("-")
  needle = needle or "single_1"
  task = niah_task.NiahConfig(
    needle=needle, context=1024 if needle == "single_1" else 4096
  )
  task.validate()
  (length,) = task.lengths("train")
  return config.Config(
    name=f"niah-{name}",
    model=small.recall_model(
      mixer, vocab_size=256, length=16 * task.context, head_dim=64
    ),
    data=config.DataConfig(
      task=task, tokenizer="bytes", sequence_length=length
    ),
    optimizer=config.OptimizerConfig(
      learning_rate=5e-3, final_learning_rate=0.0, warmup_steps=50, b2=0.98
    ),
    training=config.TrainingConfig(
      steps=1000,
      batch_size=8,
      log_every=25,
      evaluate_every=250,
      evaluate_batches=8,
      checkpoint_every=500,
    ),
  )
