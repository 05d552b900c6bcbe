"""The delta rule by GPU kernels: the XLA form, its tiles run on chip."""

from memcomp_kernels.delta_rule import xla_chunked
from memcomp_kernels.pallas_gpu.affine import backend

chunk = backend.implementation("delta_rule", xla_chunked.chunk)
unsupported = backend.unsupported
