"""Sizes that change the speed of RWKV-7, never its result."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """How the chunk form is laid out.

  Attributes:
    tile_time: tokens a tile, a multiple of `block_time`.
    block_time: tokens between which decays are taken pair by pair, channel by
      channel; those further apart go through matrix products. At width 32 a
      gradient takes a CPU 2.1 s in blocks of 16, 1.2 of 8, 0.25 of 4.
  """

  tile_time: int = 32
  block_time: int = 4

  def __post_init__(self):
    if self.block_time < 1:
      raise ValueError(f"block_time={self.block_time} must be at least 1")
    if self.tile_time < 1 or self.tile_time % self.block_time:
      raise ValueError(
        f"tile_time={self.tile_time} must be a multiple of"
        f" block_time={self.block_time}"
      )


def tile_time(tiling: Tiling, time: int) -> int:
  """Tokens a tile in a call of `time` tokens: no longer than it needs."""
  blocks = -(-time // tiling.block_time)
  return min(tiling.tile_time, blocks * tiling.block_time)
