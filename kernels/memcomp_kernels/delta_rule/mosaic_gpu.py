"""The delta rule by GPU kernels: the XLA form, its tiles run on chip."""

from memcomp_kernels.delta_rule import xla_chunked
from memcomp_kernels.primitives.mosaic_gpu import affine

chunk = affine.implementation("delta_rule", xla_chunked.chunk)
unsupported = affine.unsupported
