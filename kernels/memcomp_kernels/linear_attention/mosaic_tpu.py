"""Linear attention by TPU kernels: the XLA form, its tiles run on chip."""

from memcomp_kernels.linear_attention import xla_chunked
from memcomp_kernels.primitives.mosaic import affine

chunk = affine.implementation("linear_attention", xla_chunked.chunk)
unsupported = affine.unsupported
