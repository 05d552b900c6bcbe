"""Compressive-memory sequence operations in plain JAX and Pallas.

  from memcomp_kernels import gated_delta_rule

  y, state = gated_delta_rule(q, k, v, g=log_decay, beta=beta)

Every memory is an `op.Op`. Calling it with arrays runs it over a sequence, and
`help(gated_delta_rule)` lists its arguments. `Spec`, `Inputs`, `State`,
`init_state`, `step`, `chunk` and `reference` are attributes of it. An op has
the name of the package that defines it. So `import memcomp_kernels.trellis as
x` also gives the op. Import modules of the package with `from
memcomp_kernels.trellis import reference`.
"""

from memcomp_kernels.contract import FRESH
from memcomp_kernels.delta_rule import delta_rule, gated_delta_rule
from memcomp_kernels.dispatch import default_implementation
from memcomp_kernels.infini_attention import infini_attention
from memcomp_kernels.key_value_means import key_value_means
from memcomp_kernels.lattice import lattice
from memcomp_kernels.linear_attention import linear_attention
from memcomp_kernels.op import Op
from memcomp_kernels.ovq import ovq
from memcomp_kernels.rwkv7 import rwkv7
from memcomp_kernels.slot_attention import gated_slot_attention, slot_attention
from memcomp_kernels.softmax_attention import softmax_attention
from memcomp_kernels.state_space_duality import state_space_duality
from memcomp_kernels.tensor_cache import tensor_cache
from memcomp_kernels.test_time_training import test_time_training
from memcomp_kernels.trellis import trellis
from memcomp_kernels.two_pass_delta import two_pass_delta

ssd = state_space_duality
ttt = test_time_training  # pytest takes the long name for a test

__all__ = [
  "FRESH",
  "Op",
  "default_implementation",
  "delta_rule",
  "gated_delta_rule",
  "gated_slot_attention",
  "infini_attention",
  "key_value_means",
  "lattice",
  "linear_attention",
  "ovq",
  "rwkv7",
  "slot_attention",
  "softmax_attention",
  "ssd",
  "state_space_duality",
  "tensor_cache",
  "test_time_training",
  "trellis",
  "ttt",
  "two_pass_delta",
]


def __dir__():
  """Names the public part, without the modules that it comes from."""
  return __all__
