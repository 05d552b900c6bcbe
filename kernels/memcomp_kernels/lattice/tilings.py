"""Performance options of Lattice; they never change results."""

from memcomp_kernels.options import (
  at_least,
  not_negative,
  one_of,
  option,
  options,
)

# Tokens per block. Within a block, decays are computed for every pair of tokens
# and every slot; tokens of different blocks interact through matrix products.
# Work on pairs grows with this number, and work on the rest of a chunk with its
# inverse.
BLOCK_TIME = 16

# Tokens per tile of a TPU kernel with gradients per token, chosen by static
# cycle counts (benchmarks/tpu_static.py). The backward kernel keeps as many
# memories.
KERNEL_TIME = 16

SOLVERS = ("substitution", "sweeps")


@options
class Tiling:
  """Performance options with gradients per token; they never change results.

  Attributes:
    tile_time: tokens that are solved together, >= 1. Work within a tile grows
      with its square, work between tiles with the number of tiles.
    solver: "substitution" solves token after token. "sweeps" updates all tokens
      at once, repeatedly, until nothing moves.
    tolerance: sweeps end when no unknown moves by more than this fraction of
      the largest of its token or an earlier one. It is for float32; in float64
      it is 1e-8 times this. If it is not reached, substitution solves the tile.
    kernel_time: tokens per tile of TPU kernels, >= 1, which solve no system.
  """

  tile_time: int = option(8, at_least(1))
  solver: str = option("substitution", one_of(SOLVERS))
  tolerance: float = option(1e-6, not_negative)
  kernel_time: int = option(KERNEL_TIME, at_least(1))


DEFAULT = Tiling()
"""The fastest options on a CPU; no accelerator was measured."""
