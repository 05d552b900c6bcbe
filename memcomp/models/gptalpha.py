"""The models of the Key-Value Means paper (arXiv 2605.09877, appendix B).

GPTAlpha-2: rotary positions on half of the channels, layer norms on query and
key, token shift on the projections, a value residual, squared ReLU channels.

  kvm_120m, kvm_350m               a memory of 256 rows in every layer
  kvm_120m_sqrt, kvm_350m_sqrt     16 sqrt(tokens) rows
  kvm_120m_hybrid, kvm_350m_hybrid alternating layers: a window of 256, and a
                                   memory that saturates at 1,024 rows
"""

import math

from memcomp.layers import key_value_means, options, softmax_attention
from memcomp.models import decoder, recipe

_WIDTHS = {"120m": (12, 768, 6), "350m": (24, 1024, 8)}
_VARIANTS = {"": "fixed", "_sqrt": "power", "_hybrid": "saturating"}

NAMES = tuple(f"kvm_{size}{v}" for size in _WIDTHS for v in _VARIANTS)
"""Names of the models."""

VOCAB_SIZE = 50_304
"""Size of the GPT-2 vocabulary, rounded up."""

_BASE_WIDTH = 768  # width at which the learning rates were tuned


def _split(name: str) -> tuple[str, str]:
  size, _, variant = name.removeprefix("kvm_").partition("_")
  return size, _VARIANTS[f"_{variant}" if variant else ""]


def language_model(name: str) -> decoder.DecoderConfig:
  """The decoder called `name`, one of `NAMES`."""
  size, budget = _split(name)
  num_layers, d_model, heads = _WIDTHS[size]
  width = d_model // heads
  prepared = {
    "heads": heads,
    "key_dim": width,
    "value_dim": width,
    "rotary_frequencies": "inclusive",
    "normalize_key": "layer",
    "token_shift": True,
    "value_residual": "static",
  }
  hybrid = budget == "saturating"
  mixers: dict[str, options.MixerConfig] = {
    "memory": key_value_means.KeyValueMeansConfig(
      **prepared,
      rotary_dim=width // 2,
      budget=budget,
      budget_rows=1024 if hybrid else 256,
    )
  }
  if hybrid:
    mixers["window"] = softmax_attention.SoftmaxAttentionConfig(
      **prepared, rotary_dim=width, window_size=256
    )
  return decoder.DecoderConfig(
    vocab_size=VOCAB_SIZE,
    d_model=d_model,
    num_layers=num_layers,
    mlp_dim=4 * d_model,
    mixers=mixers,
    pattern="window+memory" if hybrid else "",
    channel_mixer="relu2_shift",
    norm="layer",
    residual_scale=12 / num_layers,
    embedding_norm=True,
    tied_embeddings=False,
    # Standard deviations of uniform distributions on +-1 / sqrt(d) and +-1e-4.
    init_std=1 / math.sqrt(3 * d_model),
    embedding_std=1e-4 / math.sqrt(3),
    # An orthogonal head [V, d] with gain sqrt(V / d) / 2.
    head_std=0.5 / math.sqrt(d_model),
    zero_init_out=True,
    dtype="bfloat16",
    remat="mixer_out",
  )


def train_recipe(name: str) -> recipe.Recipe:
  """The paper's training recipe for the model: 3 or 7.8 billion tokens."""
  size, _ = _split(name)
  # The longer run divides both rates by sqrt(15000 / 6000) at equal batch size.
  scale = math.sqrt(2.5) if size == "350m" else 1.0
  return recipe.Recipe(
    sequence_length=8192,
    batch_size=64,
    steps=15_000 if size == "350m" else 6000,
    packing="joined",  # the memory crosses document boundaries
    optimizer={
      "learning_rate": 2e-3 / scale,
      "final_learning_rate": 0.0,
      "schedule": "linear",
      "warmup_steps": 200,
      "weight_decay": 0.2 / scale,
      "corrected_decay": True,
      "base_width": _BASE_WIDTH,
      "clip_norm": 0.0,
    },
  )
