"""A language model of a paper's size, by name: <memory>-<size>.

  python train.py --config=configs/lm.py:trellis-125m \
    --config.data.source=DIR --config.data.tokenizer=tokenizer.json

Sizes: 125m, 170m, 350m, 780m, 1b, with batches of 0.5 M tokens in rows of
2,048, as in the papers. kvm_120m and kvm_350m, also with _sqrt or _hybrid, are
the models of the Key-Value Means paper with its recipe: 0.5 M tokens in rows of
8,192. DIR is a folder of text, or preferably an output of `python -m
memcomp.data.prepare`. Hardware: TPU or GPU. Time: docs/results/gpu.md has steps
at 125m on an H200. Result: not measured.
"""

from memcomp import config
from memcomp.models import presets


def get_config(name: str = "trellis-125m") -> config.Config:
  """Returns the experiment called `name`."""
  model = presets.language_model(name)
  recipe = presets.train_recipe(name)
  return config.Config(
    name=name,
    model=model,
    data=config.DataConfig(
      source="data/train",
      tokenizer="data/tokenizer.json",
      packing=recipe.packing,
      sequence_length=recipe.sequence_length,
    ),
    optimizer=config.OptimizerConfig(**recipe.optimizer),
    training=config.TrainingConfig(
      steps=recipe.steps,
      batch_size=recipe.batch_size,
      loss_chunk=512,
      log_every=10,
      evaluate_every=500,
      checkpoint_every=500,
    ),
    mesh=config.MeshConfig(replica=-1),
  )
