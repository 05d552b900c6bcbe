"""State space duality by GPU kernels: the XLA form, its tiles run on chip."""

from memcomp_kernels.primitives.mosaic_gpu import affine
from memcomp_kernels.state_space_duality import xla_chunked

chunk = affine.implementation("state_space_duality", xla_chunked.chunk)
unsupported = affine.unsupported
