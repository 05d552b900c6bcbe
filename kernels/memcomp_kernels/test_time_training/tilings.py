"""Sizes that change the speed of test-time training, never its result."""

import dataclasses

from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.test_time_training import reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """How the chunk form is laid out.

  Attributes:
    tile_time: tokens a tile with gradients per token, >= 1; with stale ones a
      tile is a chunk. Work in a tile grows with its square, work between tiles
      with the number of tiles.
    solver: of the system in a tile with gradients per token, of "linear".
  """

  tile_time: int = 16
  solver: solver_lib.Solver = dataclasses.field(
    default_factory=solver_lib.Solver
  )

  def __post_init__(self):
    if self.tile_time < 1:
      raise ValueError(f"tile_time={self.tile_time} must be at least 1")


def tile_time(spec: reference.Spec, tiling: Tiling) -> int:
  """Tokens a tile: the chunk where that is meaning, else free."""
  return spec.chunk_size if spec.stale else tiling.tile_time
