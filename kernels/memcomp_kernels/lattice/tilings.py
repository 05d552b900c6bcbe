"""Sizes that change the speed of Lattice, never its result."""

import dataclasses
from typing import TYPE_CHECKING

from memcomp_kernels.lattice import reference

if TYPE_CHECKING:
  from memcomp_kernels.pallas_tpu import pairs

# Tokens between which decays are taken pair by pair, slot by slot; those
# further apart go through matrix products. Work on pairs grows with this, work
# on the rest of a chunk with its inverse.
BLOCK_TIME = 16

# Tokens a tile of a TPU kernel, with gradients per token: chosen by static
# cycles (benchmarks/tpu_static.py). The backward kernel keeps as many memories.
KERNEL_TIME = 16

SOLVERS = ("substitution", "sweeps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """How gradients per token are evaluated.

  Attributes:
    tile_time: tokens that are solved together, >= 1: work in a tile grows with
      its square, work between tiles with the number of tiles.
    solver: "substitution", token after token; or "sweeps", all tokens at once,
      again and again until nothing moves.
    tolerance: sweeps end when no unknown moves by more than this share of the
      largest of its token or an earlier one; if None 1e-6 in float32 and 1e-14
      in float64. Where it is not reached, substitution is run after all.
    kernel_time: tokens a tile of TPU kernels, >= 1; they solve nothing.
  """

  tile_time: int = 8
  solver: str = "substitution"
  tolerance: float | None = None
  kernel_time: int = KERNEL_TIME

  def __post_init__(self):
    for name in ("tile_time", "kernel_time"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    if self.solver not in SOLVERS:
      raise ValueError(
        f"solver={self.solver!r} is not one of: {', '.join(SOLVERS)}"
      )
    if self.tolerance is not None and not self.tolerance >= 0:
      raise ValueError(f"tolerance={self.tolerance} must not be negative")


def tiling(spec: reference.Spec) -> Tiling:
  """The fastest on a CPU, for every Spec; no accelerator was measured."""
  del spec
  return Tiling()


# A lane's most value dimensions: what a pass keeps of them in registers.
_ROWS = 64


def lanes(num_pairs: int, value_dim: int) -> "list[pairs.Lanes]":
  """How pairs may lie on lanes, what is thought fastest first.

  As few parts a pair as fill the lanes: what is by slot is done in each part.

  Args:
    num_pairs: rows of the batch times heads.
    value_dim: a multiple of 8.
  """
  # Pallas, which only kernels need, takes long to import.
  from memcomp_kernels.pallas_tpu import pairs

  def cost(lanes):
    rows = value_dim / lanes.parts
    # Passes over the memory, and what a token takes by slot, in dimensions.
    return rows > _ROWS, lanes.blocks * (rows + 8), lanes.parts

  choices = [
    pairs.Lanes(num_pairs, parts)
    for parts in (1, 2, 4, 8, 16)
    if value_dim % (parts * pairs.SUBLANES) == 0
  ]
  return sorted(choices, key=cost)
