"""The delta rule by GPU kernels: the XLA form, its tiles run on chip."""

from memcomp_kernels.delta_rule import tile
from memcomp_kernels.pallas_gpu.affine import backend

chunk = backend.implementation("delta_rule", tile.chunk)
unsupported = backend.unsupported
