"""Sequence mixers around the memories, and the other layers of a model.

  layer = Trellis(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)                                       # [batch, time, 512]

Every mixer takes a width, `rngs`, and options with published defaults; see
`Mixer`. Its `Config` has the same options for config files.
"""

from memcomp.layers.base import Mixer
from memcomp.layers.delta_net import (
  DeltaNet,
  DeltaNetConfig,
  GatedDeltaNet,
  GatedDeltaNetConfig,
)
from memcomp.layers.infini_attention import (
  InfiniAttention,
  InfiniAttentionConfig,
)
from memcomp.layers.key_value_means import KeyValueMeans, KeyValueMeansConfig
from memcomp.layers.lattice import Lattice, LatticeConfig
from memcomp.layers.linear_attention import (
  LinearAttention,
  LinearAttentionConfig,
)
from memcomp.layers.mamba2 import Mamba2, Mamba2Config
from memcomp.layers.options import MixerConfig, SolverConfig
from memcomp.layers.ovq import OVQ, OVQConfig
from memcomp.layers.rwkv7 import RWKV7, RWKV7Config
from memcomp.layers.slot_attention import (
  BoundedMemory,
  BoundedMemoryConfig,
  SlotAttention,
  SlotAttentionConfig,
)
from memcomp.layers.softmax_attention import (
  SoftmaxAttention,
  SoftmaxAttentionConfig,
)
from memcomp.layers.tensor_cache import TensorCache, TensorCacheConfig
from memcomp.layers.test_time_training import (
  TestTimeTraining,
  TestTimeTrainingConfig,
)
from memcomp.layers.trellis import Trellis, TrellisConfig
from memcomp.layers.two_pass_delta import TwoPassDelta, TwoPassDeltaConfig

__all__ = [
  "OVQ",
  "RWKV7",
  "BoundedMemory",
  "BoundedMemoryConfig",
  "DeltaNet",
  "DeltaNetConfig",
  "GatedDeltaNet",
  "GatedDeltaNetConfig",
  "InfiniAttention",
  "InfiniAttentionConfig",
  "KeyValueMeans",
  "KeyValueMeansConfig",
  "Lattice",
  "LatticeConfig",
  "LinearAttention",
  "LinearAttentionConfig",
  "Mamba2",
  "Mamba2Config",
  "Mixer",
  "MixerConfig",
  "OVQConfig",
  "RWKV7Config",
  "SlotAttention",
  "SlotAttentionConfig",
  "SoftmaxAttention",
  "SoftmaxAttentionConfig",
  "SolverConfig",
  "TensorCache",
  "TensorCacheConfig",
  "TestTimeTraining",
  "TestTimeTrainingConfig",
  "Trellis",
  "TrellisConfig",
  "TwoPassDelta",
  "TwoPassDeltaConfig",
]


def __dir__():
  """Names the public part, without the modules that it comes from."""
  return __all__
