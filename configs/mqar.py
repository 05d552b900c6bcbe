"""Multi-query associative recall, by mixer: <mixer> or <mixer>-<curriculum>.

  python train.py --config=configs/mqar.py:trellis
  python train.py --config=configs/mqar.py --each=trellis,lattice --seeds=2
  python train.py --config=configs/mqar.py:trellis-based \
    --config.model.mixers.memory.heads=4
  python eval.py --checkpoint=runs/mqar-trellis --task=mqar

<mixer> alone is a toy: 66 ids, and rows of 64 tokens with 4, 8 and 16 pairs
after short rows with 4. Its decoder has two layers of d_model 64. A curriculum
of `memcomp.data.synthetic.mqar_task` (zoology64, zoology128, zoology256,
zoology512, based) is the published data, bit for bit except random filler. It
has the published order, batch size and epochs, with vocabulary 8,192 and
d_model 128. These models have a channel mixer, but the published ones do not.
Unlike here, those have embedding dropout, a learning rate that falls by epoch,
and the best of four rates. Hardware: 2 CPU cores for the toy (busy ones: 3
minutes with softmax_attention, 7 with trellis), an accelerator for a curriculum
(not measured). Expected of the toy at 4, 8 and 16 pairs, one seed:
softmax_attention and trellis 1.00, 1.00, 1.00; two_pass_delta 1.00, 1.00, 0.96.
"""

from memcomp import config
from memcomp.data.synthetic import mqar_task
from memcomp.layers import registry
from memcomp.models import small

NAMES = tuple(registry.MIXERS)

_TOY = mqar_task.Curriculum(
  "32:4:16000;64:4:3200;64:8:3200;64:16:3200",
  "64:4:512;64:8:512;64:16:512",
  batch_size=32,
  epochs=1,
)


def get_config(name: str = "trellis") -> config.Config:
  """Returns the experiment of a mixer, with a curriculum behind a hyphen."""
  mixer, _, chosen = name.partition("-")
  if chosen and chosen not in mqar_task.CURRICULA:
    raise ValueError(
      f"{chosen!r} is no curriculum; there are:"
      f" {', '.join(mqar_task.CURRICULA)}"
    )
  curriculum = mqar_task.CURRICULA[chosen] if chosen else _TOY
  task = mqar_task.MqarConfig(
    vocab_size=8192 if chosen else 66,
    train=curriculum.train,
    test=curriculum.test,
    random_filler=curriculum.random_filler,
  )
  length = max(task.lengths("train"))
  steps = curriculum.steps()
  return config.Config(
    name=f"mqar-{name}",
    model=small.recall_model(
      mixer,
      vocab_size=task.vocab_size,
      length=length,
      d_model=128 if chosen else 64,
    ),
    data=config.DataConfig(
      task=task,
      tokenizer="none",
      sequence_length=length,
      seed=mqar_task.SEED,
    ),
    optimizer=config.OptimizerConfig(
      # Muon makes mixers learn the toy that AdamW leaves stuck.
      name="adamw" if chosen else "muon",
      learning_rate=1e-3 if chosen else 1e-2,
      final_learning_rate=0.0,
      warmup_steps=50,
      b2=0.98,
    ),
    training=config.TrainingConfig(
      steps=steps,
      batch_size=curriculum.batch_size,
      log_every=25,
      evaluate_every=max(1, steps // 4),
      # All of the test rows: they come segment by segment, too.
      evaluate_batches=curriculum.batches("test"),
      checkpoint_every=max(1, steps // 2),
    ),
  )
