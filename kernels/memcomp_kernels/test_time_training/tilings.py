"""Performance options of test-time training; they never change results."""

import dataclasses

from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.test_time_training import reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """Performance options of the chunk form; they never change results.

  Attributes:
    tile_time: tokens per tile with gradients per token, >= 1. With chunk-start
      gradients a tile is a chunk. Work within a tile grows with its square,
      work between tiles with the number of tiles.
    solver: solver of the system in a tile with gradients per token, for
      "linear".
  """

  tile_time: int = 16
  solver: solver_lib.Solver = solver_lib.SUBSTITUTION

  def __post_init__(self):
    if self.tile_time < 1:
      raise ValueError(f"tile_time={self.tile_time} must be at least 1")


def tile_time(spec: reference.Spec, tiling: Tiling) -> int:
  """Returns tokens per tile: a chunk with chunk-start gradients, else free."""
  return spec.chunk_size if spec.stale else tiling.tile_time
