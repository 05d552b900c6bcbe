"""Every mixer in one small model with the same block and parameter count.

Heads have 64 features. Memories of adjustable size hold about as many numbers;
windows have 64 tokens. Models with larger mixers have narrower channel mixers,
so that parameter counts agree within 2 %.
"""

import dataclasses
import math
from typing import Any

import jax
from flax import nnx

from memcomp.layers import options, registry, softmax_attention
from memcomp.models import decoder, overview

PARAMETERS = 480_000
"""Parameter count of every model, within `TOLERANCE`."""

TOLERANCE = 0.02

WINDOW = 64
"""Length of the windows in tokens."""

_D_MODEL, _HEADS, _WIDTH = 128, 2, 64

_SAME = {"heads": _HEADS, "key_dim": _WIDTH, "value_dim": _WIDTH}

_ATTENTION = {"rotary_dim": _WIDTH}

_TTT = _ATTENTION | {"convolution_width": 0}

# Model name -> mixer, and its differences from `_SAME`. Among them are options
# whose default has changed since the comparison tuned them.
_MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
  "trellis": ("trellis", {"num_slots": 32}),
  "trellis_token": ("trellis", {"num_slots": 32, "gradient_at": "token"}),
  "lattice": ("lattice", {}),
  "lattice_token": ("lattice", {"gradient_at": "token"}),
  "key_value_means": (
    "key_value_means",
    {
      "rotary_dim": 32,
      "chunk_size": 32,
      "budget_rows": 64,
      "token_shift": False,
    },
  ),
  "tensor_cache": (
    "tensor_cache",
    _ATTENTION | {"window_size": WINDOW, "memory_output": True},
  ),
  "softmax_attention": ("softmax_attention", _ATTENTION),
  "gptalpha2": (
    "softmax_attention",
    {
      "rotary_dim": 32,
      "rotary_frequencies": "inclusive",
      "normalize_key": "layer",
      "token_shift": True,
      "value_residual": "static",
    },
  ),
  "sliding_window": (
    "softmax_attention",
    _ATTENTION | {"window_size": WINDOW},
  ),
  "block_window": (
    "softmax_attention",
    _ATTENTION | {"window_size": WINDOW, "chunk_size": WINDOW // 2},
  ),
  "streaming": (
    "softmax_attention",
    _ATTENTION | {"window_size": WINDOW, "sink_tokens": 4},
  ),
  "infini_attention": (
    "infini_attention",
    _ATTENTION | {"segment_size": WINDOW},
  ),
  "linear_attention": ("linear_attention", {}),
  # The authors' proportions: one head of 128; six of 16 and 32; four of 128 and
  # 64.
  "delta_net": ("delta_net", {"heads": 1, "key_dim": 128, "value_dim": 128}),
  "gated_delta_net": (
    "gated_delta_net",
    {"heads": 6, "key_dim": 16, "value_dim": 32},
  ),
  "mamba2": ("mamba2", {"heads": 4, "key_dim": 128}),
  "rwkv7": ("rwkv7", {}),
  "slot_attention": (
    "slot_attention",
    {"num_slots": 32, "output_gate": False},
  ),
  "bounded_memory": (
    "bounded_memory",
    {
      "key_dim": 32,
      "rotary_dim": 32,
      "num_slots": 32,
      "convolution_width": 0,
    },
  ),
  "ttt_linear": ("test_time_training", _TTT),
  "ttt_mlp": ("test_time_training", _TTT | {"model": "mlp"}),
  "two_pass_delta": ("two_pass_delta", {}),
  "ovq": ("ovq", {"chunk_size": 32, "max_rows": 64, "token_shift": False}),
}

_HYBRID = "_hybrid"

NAMES = (*_MIXERS, f"trellis{_HYBRID}")
"""Model names; one that ends in "_hybrid" has a window in its first layer."""


def language_model(name: str) -> decoder.DecoderConfig:
  """The small model called `name`, with `PARAMETERS` parameters.

  Raises:
    ValueError: the name is unknown.
  """
  if name not in NAMES:
    raise ValueError(f"{name!r} is none of: {', '.join(NAMES)}")
  mixers = {"memory": _mixer(name.removesuffix(_HYBRID))}
  if name.endswith(_HYBRID):
    mixers["window"] = softmax_attention.SoftmaxAttentionConfig(
      **_SAME, **_ATTENTION, window_size=WINDOW
    )
  return matched(
    decoder.DecoderConfig(
      vocab_size=256,
      d_model=_D_MODEL,
      num_layers=2,
      mlp_dim=384,
      mixers=mixers,
      pattern="window+memory" if "window" in mixers else "",
      embedding_convolution=4,
      init_std=0.06,
      embedding_std=0.2,
      remat="mixer_out",
    ),
    PARAMETERS,
  )


def matched(
  config: decoder.DecoderConfig, parameters: int
) -> decoder.DecoderConfig:
  """Returns `config` with the `mlp_dim` that best matches `parameters`.

  The match is within half a hidden feature per layer.

  Raises:
    ValueError: the model exceeds `parameters` even without a channel mixer.
  """

  def count(mlp_dim):
    return num_parameters(dataclasses.replace(config, mlp_dim=mlp_dim))

  one = count(1)
  per_feature = count(2) - one
  mlp_dim = 1 + round((parameters - one) / per_feature)
  if mlp_dim < 1:
    raise ValueError(
      f"{overview.mixer_names(config)} alone takes {one:,} parameters, more"
      f" than {parameters:,}; make it narrower"
    )
  return dataclasses.replace(config, mlp_dim=mlp_dim)


def num_parameters(config: decoder.DecoderConfig) -> int:
  """Counts the parameters of a model without allocating arrays."""
  shapes = jax.eval_shape(
    lambda: nnx.state(decoder.Decoder(config, rngs=nnx.Rngs(0)))
  )
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def _mixer(name: str) -> options.MixerConfig:
  kind, own = _MIXERS[name]
  return registry.config_of(kind)(**(_SAME | own))
