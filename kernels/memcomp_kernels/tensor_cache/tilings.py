"""Sizes that change the speed of Tensor Cache, never its result."""

from memcomp_kernels.tensor_cache import reference

# Work in a tile grows with its length, work between tiles falls with it. The
# delta rule also solves a triangular system a tile.
_TOKENS = {"outer": 64, "wedge": 64, "delta": 32}


def tile_time(spec: reference.Spec, time: int) -> int:
  """Tokens a tile, for a call of `time` tokens."""
  return min(_TOKENS[spec.rule], time)
