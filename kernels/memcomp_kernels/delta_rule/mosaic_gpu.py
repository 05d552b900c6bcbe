"""The delta rule by GPU kernels, which run the tiles of the XLA form."""

from memcomp_kernels.delta_rule import tile
from memcomp_kernels.pallas_gpu.affine import backend

chunk = backend.implementation("delta_rule", tile.chunk)
unsupported = backend.unsupported
