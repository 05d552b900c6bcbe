"""Linear attention by TPU kernels: the XLA form, its tiles run on chip."""

from memcomp_kernels.linear_attention import tile
from memcomp_kernels.pallas_tpu.affine import backend

chunk = backend.implementation("linear_attention", tile.chunk)
unsupported = backend.unsupported
