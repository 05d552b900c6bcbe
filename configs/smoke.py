"""A few steps of a very small model: does everything run?

  python train.py --config=configs/smoke.py
  python train.py --config=configs/smoke.py:key_value_means

The default mixer is Trellis. Hardware: any. Time: under a minute on one CPU
core. Expected: a falling loss, and an evaluation and a sample without meaning.
"""

from memcomp import config
from memcomp.layers import registry
from memcomp.models import decoder

SMALL = {
  "trellis": {"num_slots": 8, "chunk_size": 8},
  "lattice": {"num_slots": 8, "chunk_size": 8},
  "key_value_means": {
    "rotary_dim": 8,
    "chunk_size": 8,
    "budget": "power",
    "budget_rows": 8,
    "budget_scale": 2.0,
  },
  "tensor_cache": {
    "rotary_dim": 16,
    "window_size": 16,
    "write_population": "evicted",
  },
  "ovq": {"chunk_size": 8, "max_rows": 16},
  "slot_attention": {"num_slots": 8},
  "bounded_memory": {"num_slots": 8, "rotary_dim": 16},
  "infini_attention": {"rotary_dim": 16, "segment_size": 16},
  "softmax_attention": {"rotary_dim": 16},
  "test_time_training": {"rotary_dim": 16, "chunk_size": 8},
}
"""Small options by mixer, besides heads and widths."""


def get_config(mixer: str = "trellis") -> config.Config:
  """Returns the experiment with the mixer called `mixer`."""
  return config.Config(
    name="smoke" if mixer == "trellis" else f"smoke-{mixer}",
    model=decoder.DecoderConfig(
      vocab_size=256,
      d_model=32,
      num_layers=2,
      mlp_dim=64,
      mixers={
        "memory": registry.config_of(mixer)(
          heads=2, key_dim=16, value_dim=16, **SMALL.get(mixer, {})
        )
      },
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
