"""Models of the papers' sizes, by name: `<memory>-<size>`.

The models of the Key-Value Means paper are in `gptalpha`.
"""

import dataclasses

from memcomp.layers import options, registry
from memcomp.models import decoder, gptalpha, recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
  """A row of the papers' tables.

  Attributes:
    num_layers: number of blocks.
    d_model: width of the residual stream.
    heads: number of heads of d_model / heads features each.
    mlp_dim: hidden features of the channel mixer.
    learning_rate: peak of the schedule.
    tokens: number of training tokens.
  """

  num_layers: int
  d_model: int
  heads: int
  mlp_dim: int
  learning_rate: float
  tokens: float


# Table 5 of Trellis (arXiv 2512.23852) has no 1b row and no mlp widths. Those
# come from the test-time-training code base that Trellis builds on.
SIZES = {
  "125m": Size(
    num_layers=12,
    d_model=768,
    heads=12,
    mlp_dim=2048,
    learning_rate=3e-3,
    tokens=2.4e9,
  ),
  "170m": Size(
    num_layers=12,
    d_model=768,
    heads=16,
    mlp_dim=2048,
    learning_rate=3e-3,
    tokens=15e9,
  ),
  "350m": Size(
    num_layers=24,
    d_model=1024,
    heads=16,
    mlp_dim=2736,
    learning_rate=1.5e-3,
    tokens=7.5e9,
  ),
  "780m": Size(
    num_layers=24,
    d_model=1536,
    heads=16,
    mlp_dim=4096,
    learning_rate=1.25e-3,
    tokens=30e9,
  ),
  "1b": Size(
    num_layers=24,
    d_model=2048,
    heads=32,
    mlp_dim=5504,
    learning_rate=1e-3,
    tokens=30e9,
  ),
}

VOCAB_SIZE = 32_000
"""Size of the Llama 2 tokenizer, which the papers use."""

WIDE_MIXERS = ("gated_delta_net", "mamba2", "slot_attention")
"""Mixers with 6 d_model^2 weights."""


def names() -> list[str]:
  """All names that `language_model` takes."""
  by_size = [f"{m}-{s}" for m in registry.MIXERS for s in SIZES]
  return by_size + list(gptalpha.NAMES)


def parse(name: str) -> tuple[str, str]:
  """Splits "trellis-125m" into memory and size.

  Raises:
    ValueError: naming the existing memories and sizes.
  """
  memory, _, size = name.rpartition("-")
  if memory not in registry.MIXERS or size not in SIZES:
    raise ValueError(
      f"{name!r} is not <memory>-<size>; memories:"
      f" {', '.join(registry.MIXERS)}; sizes: {', '.join(SIZES)}; nor one of"
      f" {', '.join(gptalpha.NAMES)}"
    )
  return memory, size


def _mixer(memory: str, size: Size) -> options.MixerConfig:
  width = size.d_model // size.heads
  own = {
    # The authors' sizes: heads of 128; or 3/4 d_model for keys and twice that
    # for values.
    "delta_net": {
      "heads": size.d_model // 128,
      "key_dim": 128,
      "value_dim": 128,
    },
    "gated_delta_net": {
      "heads": 6,
      "key_dim": size.d_model // 8,
      "value_dim": size.d_model // 4,
    },
    "lattice": {"num_slots": width},
    "key_value_means": {"rotary_dim": width // 2},
    "slot_attention": {"num_slots": width},
    # The paper's released layer has keys of half the width.
    "bounded_memory": {
      "key_dim": width // 2,
      "num_slots": width // 2,
      "rotary_dim": width // 2,
    },
    "infini_attention": {"rotary_dim": width},
    # Inner width 2 d_model, heads of 64, state of 128.
    "mamba2": {
      "heads": size.d_model // 32,
      "key_dim": 128,
      "value_dim": 64,
    },
    "softmax_attention": {"rotary_dim": width},
    # As published.
    "tensor_cache": {"rotary_dim": width, "memory_output": True},
    "test_time_training": {"rotary_dim": width},
  }
  config = registry.config_of(memory)
  common = {"heads": size.heads, "key_dim": width, "value_dim": width}
  return config(**(common | own.get(memory, {})))


def _num_layers(memory: str, size: Size) -> int:
  """Number of blocks; 1/8 fewer if the mixer has 6 d_model^2 weights.

  Attention has 4 d_model^2 weights, and the channel mixer has 8. Models of
  twelve blocks keep them, because fewer would miss the size's parameter count
  more.
  """
  wide = memory in WIDE_MIXERS and size.num_layers > 12
  return size.num_layers - size.num_layers // 8 * wide


def language_model(name: str) -> decoder.DecoderConfig:
  """The decoder called `name`: "<memory>-<size>" or a "kvm_..." model.

  Raises:
    ValueError: the memory, size or name is unknown.
  """
  if name in gptalpha.NAMES:
    return gptalpha.language_model(name)
  memory, size_name = parse(name)
  size = SIZES[size_name]
  return decoder.DecoderConfig(
    vocab_size=VOCAB_SIZE,
    d_model=size.d_model,
    num_layers=_num_layers(memory, size),
    mlp_dim=size.mlp_dim,
    mixers={"memory": _mixer(memory, size)},
    dtype="bfloat16",
    remat="mixer_out",
  )


def train_recipe(name: str) -> recipe.Recipe:
  """The training recipe of a model: half a million tokens per batch."""
  if name in gptalpha.NAMES:
    return gptalpha.train_recipe(name)
  size = SIZES[parse(name)[1]]
  steps = round(size.tokens / (2048 * 256))
  return recipe.Recipe(
    sequence_length=2048,
    batch_size=256,
    steps=steps,
    packing="concat",
    optimizer={
      "learning_rate": size.learning_rate,
      "final_learning_rate": 1e-5,
      "warmup_steps": steps // 10,
    },
  )
