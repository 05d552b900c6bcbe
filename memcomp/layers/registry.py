"""Mixers by name, for configs, presets and docs."""

from typing import Any

from memcomp.layers import base
from memcomp.layers.delta_net import DeltaNet, GatedDeltaNet
from memcomp.layers.infini_attention import InfiniAttention
from memcomp.layers.key_value_means import KeyValueMeans
from memcomp.layers.lattice import Lattice
from memcomp.layers.linear_attention import LinearAttention
from memcomp.layers.mamba2 import Mamba2
from memcomp.layers.ovq import OVQ
from memcomp.layers.rwkv7 import RWKV7
from memcomp.layers.slot_attention import BoundedMemory, SlotAttention
from memcomp.layers.softmax_attention import SoftmaxAttention
from memcomp.layers.tensor_cache import TensorCache
from memcomp.layers.test_time_training import TestTimeTraining
from memcomp.layers.trellis import Trellis
from memcomp.layers.two_pass_delta import TwoPassDelta

MIXERS: dict[str, type[base.Mixer]] = {
  "trellis": Trellis,
  "lattice": Lattice,
  "delta_net": DeltaNet,
  "gated_delta_net": GatedDeltaNet,
  "key_value_means": KeyValueMeans,
  "infini_attention": InfiniAttention,
  "linear_attention": LinearAttention,
  "mamba2": Mamba2,
  "slot_attention": SlotAttention,
  "bounded_memory": BoundedMemory,
  "softmax_attention": SoftmaxAttention,
  "tensor_cache": TensorCache,
  "ovq": OVQ,
  "rwkv7": RWKV7,
  "two_pass_delta": TwoPassDelta,
  "test_time_training": TestTimeTraining,
}
"""Mixer classes by name; `Config` has the options of each."""


def name_of(config: Any) -> str:
  """The name of the mixer that `config` configures."""
  for name, mixer in MIXERS.items():
    if type(config) is mixer.Config:
      return name
  raise ValueError(f"{type(config).__name__} configures no known mixer")


def module_of(config: Any) -> type[base.Mixer]:
  """The class that `config` configures."""
  return MIXERS[name_of(config)]


def memory_of(name: str) -> str:
  """The package in `memcomp_kernels` that the mixer called `name` uses.

  Several mixers may share one memory; the module of its `Spec` tells which.
  """
  return config_of(name).op.Spec.__module__.split(".")[1]


def config_of(name: str) -> type:
  """The config class of the mixer called `name`.

  Raises:
    ValueError: naming the existing mixers.
  """
  if name not in MIXERS:
    raise ValueError(f"{name!r} is no mixer; there are: {', '.join(MIXERS)}")
  return MIXERS[name].Config
