"""Sizes that change the speed of the two-pass delta rule, never its result."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """How the chunk form is laid out.

  Attributes:
    tile_time: tokens a tile, >= 1. Work in a tile grows with its square, work
      between tiles with the number of tiles.
  """

  tile_time: int = 32

  def __post_init__(self):
    if self.tile_time < 1:
      raise ValueError(f"tile_time={self.tile_time} must be at least 1")
