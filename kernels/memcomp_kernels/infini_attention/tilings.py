"""Performance options of Infini-attention; they never change results."""

import dataclasses

from memcomp_kernels.infini_attention import reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """Performance options of the memory; they never change results.

  Attributes:
    tile_time: tokens per tile in the form per token, >= 1. Otherwise a tile is
      a segment.
  """

  tile_time: int = 64

  def __post_init__(self):
    if self.tile_time < 1:
      raise ValueError(f"tile_time={self.tile_time} must be at least 1")


def tile_time(spec: reference.Spec, tiling: Tiling, time: int) -> int:
  """Returns tokens per tile: the segment if there is one, else free."""
  return spec.segment_size if spec.stale else min(tiling.tile_time, time)
