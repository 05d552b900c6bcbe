"""Shakespeare byte by byte, far beyond the trained length, by five methods.

  python train.py --config=configs/shakespeare.py:tensor_cache
  python train.py --config=configs/shakespeare.py --each=all

Based on Tensor Cache's Table 2b: 4 layers, 4 heads, d_model 128, trained on
rows of 256 with windows of 128. The evaluation reads 64 times that from four
starts with the state carried. Differences: bytes instead of GPT-2 tokens, and
500 steps of 16 rows (two epochs) instead of 3,000 of 64. Names are the methods
of Table 1 in configs/recall.py. The text is not included: shakespeare/train.txt
is the first nine tenths of tinyshakespeare, and shakespeare/validation.txt the
last tenth (`head -c 1003854`, `tail -c 111540`). Hardware: 2 CPU cores.
Expected: docs/results/shakespeare.md.
"""

from memcomp import config
from memcomp.layers import (
  infini_attention,
  options,
  softmax_attention,
  tensor_cache,
)
from memcomp.models import decoder

_WINDOW = 128
_HEADS = {"heads": 4, "key_dim": 32, "value_dim": 32, "rotary_dim": 32}

MIXERS: dict[str, options.MixerConfig] = {
  "full": softmax_attention.SoftmaxAttentionConfig(**_HEADS),
  "window": softmax_attention.SoftmaxAttentionConfig(
    **_HEADS, window_size=_WINDOW
  ),
  "streaming": softmax_attention.SoftmaxAttentionConfig(
    **_HEADS, window_size=_WINDOW + 4, sink_tokens=4
  ),
  "infini": infini_attention.InfiniAttentionConfig(
    **_HEADS, segment_size=_WINDOW
  ),
  # As in the paper's runs; the layer's default has unit keys and queries, and
  # one output projection.
  "tensor_cache": tensor_cache.TensorCacheConfig(
    **_HEADS,
    window_size=_WINDOW,
    write_population="evicted",
    unit_keys=False,
    unit_queries=False,
    memory_output=True,
  ),
}

NAMES = tuple(MIXERS)


def get_config(name: str = "tensor_cache") -> config.Config:
  """Returns the experiment of the method called `name`."""
  if name not in MIXERS:
    raise ValueError(f"{name!r} is none of: {', '.join(MIXERS)}")
  return config.Config(
    name=f"shakespeare-{name}",
    model=decoder.DecoderConfig(
      vocab_size=256,
      d_model=128,
      num_layers=4,
      mlp_dim=512,
      mixers={"memory": MIXERS[name]},
      channel_mixer="gelu",
      norm="layer",
    ),
    data=config.DataConfig(
      source="shakespeare/train.txt", validation="shakespeare/validation.txt"
    ),
    optimizer=config.OptimizerConfig(
      learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=100, b2=0.99
    ),
    training=config.TrainingConfig(
      steps=500,
      batch_size=16,
      log_every=50,
      evaluate_every=250,
      checkpoint_every=500,
    ),
    evaluation=config.EvaluationConfig(lengths=64, rows=4, prompt="ROMEO:"),
  )
