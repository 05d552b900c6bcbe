"""A language model of a paper's size, by name: <memory>-<size>.

  python train.py --config=configs/lm.py:trellis-125m \
    --config.data.source=DIR --config.data.tokenizer=tokenizer.json

Sizes 125m, 170m, 350m, 780m, 1b; batches of 0.5 M tokens at 2,048, as in the
papers. DIR is a folder of text, or better one that `python -m
memcomp.data.prepare` wrote. Hardware: TPU or GPU. Hours and result: not
measured.
"""

from memcomp import config
from memcomp.models import presets


def get_config(name: str = "trellis-125m") -> config.Config:
  """Returns the experiment called `name`."""
  model = presets.language_model(name)
  size = presets.SIZES[presets.parse(name)[1]]
  sequence_length, batch_size = 2048, 256
  steps = round(size.tokens / (sequence_length * batch_size))
  return config.Config(
    name=name,
    model=model,
    data=config.DataConfig(
      source="data/train",
      tokenizer="data/tokenizer.json",
      packing="concat",
      sequence_length=sequence_length,
    ),
    optimizer=config.OptimizerConfig(
      learning_rate=size.learning_rate,
      final_learning_rate=1e-5,
      warmup_steps=steps // 10,
    ),
    training=config.TrainingConfig(
      steps=steps,
      batch_size=batch_size,
      loss_chunk=512,
      log_every=10,
      evaluate_every=500,
      checkpoint_every=500,
    ),
    mesh=config.MeshConfig(replica=-1),
  )
