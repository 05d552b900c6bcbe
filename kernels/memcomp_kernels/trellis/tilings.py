"""Sizes that change the speed of Trellis, never its result."""

from memcomp_kernels.trellis import types

# Tokens that forward substitution solves together: work in a tile grows with
# its square, work between tiles with the number of tiles.
_TOKEN_TILE = 16


def tile_time(spec: types.Spec) -> int:
  """Tokens a tile: the chunk where that is meaning, else free."""
  return spec.chunk_size if spec.stale else _TOKEN_TILE


def tiles_for_packing(whole: int) -> int:
  """Tiles reserved for packed rows that would fill `whole` tiles unpacked.

  A row may be cut into about a quarter as many segments as it has tiles before
  it is scanned by token instead: documents of four chunks on average.
  """
  return whole + max(whole // 4, 2)
