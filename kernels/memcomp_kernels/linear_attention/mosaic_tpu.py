"""Linear attention by TPU kernels, which run the tiles of the XLA form."""

from memcomp_kernels.linear_attention import tile
from memcomp_kernels.pallas_tpu.affine import backend

chunk = backend.implementation("linear_attention", tile.chunk)
unsupported = backend.unsupported
