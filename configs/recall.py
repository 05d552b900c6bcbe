"""Recall over a gap, by the methods of Tensor Cache's Table 1.

  python train.py --config=configs/recall.py:tensor_cache
  python train.py --config=configs/recall.py:window --config.data.task.gap=48 \
    --config.data.sequence_length=343
  python train.py --config=configs/recall.py --each=all --seeds=3
  python eval.py --checkpoint=runs/recall-tensor_cache --task=recall

The paper's size and recipe: 4 layers, 4 heads, d_model 128, a window of 12
tokens, 300 steps of 32 rows of six episodes (`memcomp.data.synthetic.recall`).
A row at gap g takes 6 (g + 9) + 1 tokens. Hardware: 2 CPU cores. Time: see
docs/results/recall.md. Expected: full and tensor_cache recall, window and
streaming answer by chance, 6 %.
"""

from memcomp import config
from memcomp.data.synthetic import recall
from memcomp.layers import (
  infini_attention,
  mixer,
  softmax_attention,
  tensor_cache,
)
from memcomp.models import decoder

_WINDOW = 12
_HEADS = {"heads": 4, "key_dim": 32, "value_dim": 32, "rotary_dim": 32}

MIXERS: dict[str, mixer.MixerConfig] = {
  "full": softmax_attention.SoftmaxAttentionConfig(**_HEADS),
  "window": softmax_attention.SoftmaxAttentionConfig(
    **_HEADS, window_size=_WINDOW
  ),
  # Four sinks beside the window; at their positions in the text, as the
  # paper's baseline has them.
  "streaming": softmax_attention.SoftmaxAttentionConfig(
    **_HEADS,
    window_size=_WINDOW + 4,
    sink_tokens=4,
    sink_positions="text",
  ),
  # As it generates: a memory per token, of rotated keys.
  "infini": infini_attention.InfiniAttentionConfig(
    **_HEADS, window_size=_WINDOW, segment_size=1, rotate_memory=True
  ),
  # Written as it generates: what leaves the window.
  "tensor_cache": tensor_cache.TensorCacheConfig(
    **_HEADS, window_size=_WINDOW, write_population="evicted"
  ),
}

NAMES = tuple(MIXERS)


def get_config(method: str = "tensor_cache") -> config.Config:
  """Returns the experiment of the method called `method`."""
  task = recall.RecallConfig(gap=24)
  return config.Config(
    name=f"recall-{method}",
    model=decoder.DecoderConfig(
      vocab_size=64,
      d_model=128,
      num_layers=4,
      mlp_dim=512,
      mixer=MIXERS[method],
      channel_mixer="gelu",
      norm="layer",
    ),
    data=config.DataConfig(
      task=task, tokenizer="none", sequence_length=task.tokens()
    ),
    optimizer=config.OptimizerConfig(
      learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=30
    ),
    training=config.TrainingConfig(
      steps=300,
      batch_size=32,
      log_every=10,
      evaluate_every=100,
      checkpoint_every=300,
    ),
  )
