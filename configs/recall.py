"""Recall over a gap, with the methods of Tensor Cache's Table 1.

  python train.py --config=configs/recall.py:tensor_cache
  python train.py --config=configs/recall.py --each=all --seeds=3
  python eval.py --checkpoint=runs/recall-tensor_cache-24 --task=recall

Names are METHOD-GAP (METHOD alone has gap 24), METHOD-longGAP for rows of one
episode, and METHOD-multistore for two pairs at gap 24. --each=all is Table 1:
each of its methods at gaps 24, 36 and 48. Methods of Tables 4 and 9 are chunkN
(N = 1, 8, 32, 64: every token is written, and read from the next chunk on),
mean64 (the shortcut by chunk means), delta and wedge. default is tensor_cache
with unit keys, unit queries and one output projection, and closed is default
with read_gate_init=-5. Size and recipe are the paper's: 4 layers, 4 heads,
d_model 128, a window of 12 tokens, 300 steps of 32 rows
(`memcomp.data.synthetic.recall`). Hardware: 2 CPU cores. Time: 3 to 4 seconds
of one core per step at gap 24, 1.7 times that at gap 48. Expected:
docs/results/gaps.md; tensor_cache recalls everything at its own gap, and window
is at chance, 6 %.
"""

import re
from typing import Any

from memcomp import config
from memcomp.data.synthetic import recall
from memcomp.layers import (
  infini_attention,
  options,
  softmax_attention,
  tensor_cache,
)
from memcomp.models import decoder

_WINDOW = 12
_HEADS = {"heads": 4, "key_dim": 32, "value_dim": 32, "rotary_dim": 32}


def _by_default(**fields: Any) -> tensor_cache.TensorCacheConfig:
  """As the layer by default: unit keys and queries, one projection."""
  return tensor_cache.TensorCacheConfig(
    **_HEADS, window_size=_WINDOW, write_population="evicted", **fields
  )


def _tensor_cache(**fields: Any) -> tensor_cache.TensorCacheConfig:
  """As in the paper: keys of any length, and W_tc for the memory's reads."""
  paper = {"unit_keys": False, "unit_queries": False, "memory_output": True}
  return tensor_cache.TensorCacheConfig(
    **_HEADS, **paper, window_size=_WINDOW, **fields
  )


TABLE_1: dict[str, options.MixerConfig] = {
  "full": softmax_attention.SoftmaxAttentionConfig(**_HEADS),
  "window": softmax_attention.SoftmaxAttentionConfig(
    **_HEADS, window_size=_WINDOW
  ),
  # Four sinks beside the window, at their text positions as in the paper's
  # baseline.
  "streaming": softmax_attention.SoftmaxAttentionConfig(
    **_HEADS,
    window_size=_WINDOW + 4,
    sink_tokens=4,
    sink_positions="text",
  ),
  # As in its generation: a memory update per token, of rotated keys.
  "infini": infini_attention.InfiniAttentionConfig(
    **_HEADS, window_size=_WINDOW, segment_size=1, rotate_memory=True
  ),
  # As in its generation: tokens that leave the window are written.
  "tensor_cache": _tensor_cache(write_population="evicted"),
}
MIXERS: dict[str, options.MixerConfig] = TABLE_1 | {
  **{f"chunk{n}": _tensor_cache(chunk_size=n) for n in (1, 8, 32, 64)},
  "mean64": _tensor_cache(chunk_size=64, chunk_mean=True),
  "delta": _tensor_cache(write_population="evicted", rule="delta"),
  "wedge": _tensor_cache(write_population="evicted", rule="wedge"),
  "default": _by_default(),
  "closed": _by_default(read_gate_init=-5.0),
}

NAMES = tuple(f"{name}-{gap}" for gap in (24, 36, 48) for name in TABLE_1)


def get_config(name: str = "tensor_cache") -> config.Config:
  """Returns the experiment of METHOD, METHOD-GAP and so on."""
  method, _, kind = name.partition("-")
  if method not in MIXERS:
    raise ValueError(f"{method!r} is none of: {', '.join(MIXERS)}")
  task = _task(kind or "24")
  return config.Config(
    name=f"recall-{name}",
    model=decoder.DecoderConfig(
      vocab_size=64,
      d_model=128,
      num_layers=4,
      mlp_dim=512,
      mixers={"memory": MIXERS[method]},
      channel_mixer="gelu",
      norm="layer",
    ),
    data=config.DataConfig(
      task=task,
      tokenizer="none",
      # The paper's rows of one episode have five more tokens.
      sequence_length=task.tokens() + 5 * (task.episodes == 1),
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


def _task(kind: str) -> recall.RecallConfig:
  if kind == "multistore":
    return recall.RecallConfig(gap=24, pairs=2)
  found = re.fullmatch(r"(long)?(\d+)", kind)
  if not found:
    raise ValueError(f"{kind!r} is none of: GAP, longGAP, multistore")
  return recall.RecallConfig(gap=int(found[2]), episodes=1 if found[1] else 6)
