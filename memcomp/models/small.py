"""Small decoders that learn to recall, one for each mixer.

All have two layers and the same shape, for recall benchmarks and
`configs/mqar.py`.
"""

from typing import Any

from memcomp.layers import registry
from memcomp.models import decoder


def recall_model(
  mixer: str,
  *,
  vocab_size: int,
  length: int,
  d_model: int = 64,
  head_dim: int = 32,
) -> decoder.DecoderConfig:
  """A small decoder whose state is a few thousand floats.

  Args:
    mixer: name of the mixer.
    vocab_size: number of token ids.
    length: tokens of the longest row.
    d_model: model width. Heads keep their size, so wider models have more
      heads.
    head_dim: key and value features per head. Slots, rows and windows scale
      with it, so it determines the state size.

  Raises:
    ValueError: the mixer is unknown, `d_model` is not a multiple of 64, or
      `head_dim` is not a multiple of 8.
  """
  if d_model < 64 or d_model % 64:
    raise ValueError(f"d_model={d_model} must be a multiple of 64")
  if head_dim < 8 or head_dim % 8:
    raise ValueError(f"head_dim={head_dim} must be a multiple of 8")
  heads = d_model // 32
  half, quarter = head_dim // 2, head_dim // 4
  fields: dict[str, Any] = {
    "heads": heads,
    "key_dim": head_dim,
    "value_dim": head_dim,
  }
  fields |= {
    # Each pair occurs once, so a weak write cannot be recalled.
    "trellis": {
      "num_slots": head_dim,
      "write_rate_init": 0.3,
      # It is read with what is written: with 0.5 some seeds learn late.
      "memory_std": 0.1,
    },
    # An inner width of twice d_model.
    "mamba2": {"heads": 2 * heads},
    "infini_attention": {
      "rotary_dim": half,
      "segment_size": quarter,
      "window_size": half,
    },
    "softmax_attention": {"rotary_dim": half, "max_length": length},
    "key_value_means": {
      "rotary_dim": half,
      "chunk_size": quarter,
      "budget_rows": half,
      "max_length": length,
      "token_shift": False,
    },
    "lattice": {"num_slots": head_dim},
    "ovq": {
      "chunk_size": quarter,
      "max_rows": 3 * quarter,
      "token_shift": False,
    },
    "slot_attention": {"num_slots": head_dim, "output_gate": False},
    "bounded_memory": {
      "num_slots": head_dim,
      "rotary_dim": 0,
      "convolution_width": 0,
    },
    "tensor_cache": {
      "rotary_dim": half,
      "window_size": half,
      "chunk_size": quarter,
      "memory_output": True,
    },
    "test_time_training": {"rotary_dim": 0},
  }.get(mixer, {})
  return decoder.DecoderConfig(
    vocab_size=vocab_size,
    d_model=d_model,
    num_layers=2,
    mlp_dim=2 * d_model,
    mixers={"memory": registry.config_of(mixer)(**fields)},
    # Attention needs each value to see its key, which some mixers' own
    # convolutions provide; so all models get one.
    embedding_convolution=4,
    init_std=0.1,
    embedding_std=0.1,
  )
