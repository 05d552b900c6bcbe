"""Sizes that change the speed of Trellis, never its result."""

from memcomp_kernels.trellis import types

# Tokens that forward substitution solves together: work in a tile grows with
# its square, work between tiles with the number of tiles.
_TOKEN_TILE = 16


def tile_time(spec: types.Spec) -> int:
  """Tokens a tile: the chunk where that is meaning, else free."""
  return spec.chunk_size if spec.stale else _TOKEN_TILE
