"""Small decoders that learn to recall, one around each mixer.

Two layers of d_model 64, in one shape for all memories: for benchmarks of
recall, and for `configs/mqar.py`.
"""

from typing import Any

from memcomp.models import decoder, registry


def recall_model(
  mixer: str, *, vocab_size: int, length: int, d_model: int = 64
) -> decoder.DecoderConfig:
  """A small decoder around a mixer; its state is a few thousand floats.

  Args:
    mixer: its name.
    vocab_size: token ids.
    length: tokens of the longest row.
    d_model: width; heads keep theirs, so wider models have more of them.

  Raises:
    ValueError: no such mixer, or `d_model` is no multiple of 64.
  """
  if d_model < 64 or d_model % 64:
    raise ValueError(f"d_model={d_model} must be a multiple of 64")
  heads = d_model // 32
  fields: dict[str, Any] = {"heads": heads, "key_dim": 32, "value_dim": 32}
  fields |= {
    # A pair is told once: a write that changes little is not found again.
    "trellis": {"num_slots": 32, "write_rate_init": 0.3},
    # An inner width of twice d_model.
    "mamba2": {"heads": 2 * heads},
    "infini_attention": {
      "rotary_dim": 16,
      "segment_size": 8,
      "window_size": 16,
    },
    "softmax_attention": {"rotary_dim": 16, "max_length": length},
    "key_value_means": {
      "rotary_dim": 16,
      "chunk_size": 8,
      "budget_rows": 16,
      "max_length": length,
    },
    "lattice": {"num_slots": 32},
    "ovq": {"chunk_size": 8, "max_rows": 24},
    "slot_attention": {"num_slots": 32},
    "bounded_memory": {"num_slots": 32, "rotary_dim": 0},
    "tensor_cache": {"rotary_dim": 16, "window_size": 16, "chunk_size": 8},
    "test_time_training": {"rotary_dim": 0, "convolution_width": 4},
  }.get(mixer, {})
  return decoder.DecoderConfig(
    vocab_size=vocab_size,
    d_model=d_model,
    num_layers=2,
    mlp_dim=2 * d_model,
    mixer=registry.config_of(mixer)(**fields),
    # Attention needs each value to know its key: all get what some have.
    embedding_convolution=4,
    init_std=0.1,
    embedding_std=0.1,
  )
