"""Mixers by name: the one list that configs, presets and docs go by."""

from typing import Any

from memcomp.layers import (
  delta_net,
  infini_attention,
  key_value_means,
  lattice,
  linear_attention,
  mamba2,
  ovq,
  rwkv7,
  slot_attention,
  softmax_attention,
  tensor_cache,
  test_time_training,
  trellis,
  two_pass_delta,
)

MIXERS: dict[str, tuple[type, type]] = {
  "trellis": (trellis.TrellisConfig, trellis.Trellis),
  "lattice": (lattice.LatticeConfig, lattice.Lattice),
  "delta_net": (delta_net.DeltaNetConfig, delta_net.DeltaNet),
  "gated_delta_net": (delta_net.GatedDeltaNetConfig, delta_net.DeltaNet),
  "key_value_means": (
    key_value_means.KeyValueMeansConfig,
    key_value_means.KeyValueMeans,
  ),
  "infini_attention": (
    infini_attention.InfiniAttentionConfig,
    infini_attention.InfiniAttention,
  ),
  "linear_attention": (
    linear_attention.LinearAttentionConfig,
    linear_attention.LinearAttention,
  ),
  "mamba2": (mamba2.Mamba2Config, mamba2.Mamba2),
  "slot_attention": (
    slot_attention.SlotAttentionConfig,
    slot_attention.SlotAttention,
  ),
  "bounded_memory": (
    slot_attention.BoundedMemoryConfig,
    slot_attention.SlotAttention,
  ),
  "softmax_attention": (
    softmax_attention.SoftmaxAttentionConfig,
    softmax_attention.SoftmaxAttention,
  ),
  "tensor_cache": (
    tensor_cache.TensorCacheConfig,
    tensor_cache.TensorCache,
  ),
  "ovq": (ovq.OVQConfig, ovq.OVQ),
  "rwkv7": (rwkv7.RWKV7Config, rwkv7.RWKV7),
  "two_pass_delta": (
    two_pass_delta.TwoPassDeltaConfig,
    two_pass_delta.TwoPassDelta,
  ),
  "test_time_training": (
    test_time_training.TestTimeTrainingConfig,
    test_time_training.TestTimeTraining,
  ),
}
"""name -> (configuration, module), see `layers.mixer`."""


def name_of(config: Any) -> str:
  """The name of the mixer that `config` configures."""
  for name, (config_type, _) in MIXERS.items():
    if type(config) is config_type:
      return name
  raise ValueError(f"{type(config).__name__} configures no known mixer")


def module_of(config: Any) -> type:
  """The module that `config` configures."""
  return MIXERS[name_of(config)][1]


def memory_of(name: str) -> str:
  """The package in `memcomp_kernels` of the mixer called `name`.

  Several mixers may have one memory: its `Spec` tells.
  """
  return type(config_of(name)().spec()).__module__.split(".")[1]


def config_of(name: str) -> type:
  """The configuration of the mixer called `name`.

  Raises:
    ValueError: naming the mixers there are.
  """
  if name not in MIXERS:
    raise ValueError(f"{name!r} is no mixer; there are: {', '.join(MIXERS)}")
  return MIXERS[name][0]
