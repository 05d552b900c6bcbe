"""Performance options of Tensor Cache; they never change results."""

from memcomp_kernels.tensor_cache import reference

# Work within a tile grows with its length, work between tiles falls with it.
# The delta rule also solves a triangular system per tile.
_TOKENS = {"outer": 64, "wedge": 64, "delta": 32}


def tile_time(spec: reference.Spec, time: int) -> int:
  """Returns tokens per tile, for a call of `time` tokens."""
  return min(_TOKENS[spec.rule], time)
