"""Performance options of test-time training; they never change results."""

from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.options import at_least, option, options
from memcomp_kernels.test_time_training import reference


@options
class Tiling:
  """Performance options of the chunk form; they never change results.

  Attributes:
    tile_time: tokens per tile with gradients per token, >= 1. With chunk-start
      gradients a tile is a chunk. Work within a tile grows with its square,
      work between tiles with the number of tiles.
    solver: solver of the system in a tile with gradients per token, for
      "linear".
  """

  tile_time: int = option(16, at_least(1))
  solver: solver_lib.Solver = solver_lib.SUBSTITUTION


DEFAULT = Tiling()


def tile_time(spec: reference.Spec, tiling: Tiling) -> int:
  """Returns tokens per tile: a chunk with chunk-start gradients, else free."""
  return spec.chunk_size if spec.stale else tiling.tile_time
