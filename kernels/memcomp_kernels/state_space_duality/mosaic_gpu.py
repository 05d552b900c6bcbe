"""State space duality by GPU kernels, which run the tiles of the XLA form."""

from memcomp_kernels.pallas_gpu.affine import backend
from memcomp_kernels.state_space_duality import tile

chunk = backend.implementation("state_space_duality", tile.chunk)
unsupported = backend.unsupported
