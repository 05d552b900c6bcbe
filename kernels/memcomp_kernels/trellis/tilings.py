"""Performance options of Trellis; they never change results."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.options import REQUIRED, at_least, one_of, option, options
from memcomp_kernels.pallas_tpu import LANES
from memcomp_kernels.trellis import reference

DECAYS = ("auto", "separable", "safe")

_MEMORIES_BYTES = 4 * 2**20  # per grid step; blocks hold eight times as much

_TILE_TIME = 16


@options
class KernelTiling:
  """Block sizes and schedule of a TPU kernel; see `pallas_tpu.schedule`.

  A unit is a number of heads that share the 128 lanes.

  Attributes:
    units: maximum number of units per grid step.
    chunks: maximum number of chunks per grid step, or as many as fill 128 lanes
      with tokens; a power of two.
    group: number of units emitted in lock step.
    skew: number of stages between two groups.
    join: whether to fuse A@B + C@D into one matmul.
    rows: maximum number of batch rows per grid step; useful with gradients per
      token.
  """

  units: int = option(REQUIRED, at_least(1))
  chunks: int = option(REQUIRED, at_least(1))
  group: int = option(REQUIRED, at_least(1))
  skew: int = option(REQUIRED, at_least(1))
  join: bool = False
  rows: int = option(1, at_least(1))

  def __post_init__(self):
    if self.chunks & (self.chunks - 1):
      raise ValueError(f"chunks={self.chunks} must be a power of two")

  def smaller(self) -> Iterator["KernelTiling"]:
    """Yields these sizes, and then smaller ones."""
    for units in range(self.units, 0, -1):
      for rows, chunks in itertools.product(
        _halves(self.rows), _halves(self.chunks)
      ):
        yield dataclasses.replace(self, units=units, rows=rows, chunks=chunks)

  def sizes(
    self, num_units: int, num_chunks: int, tokens: int
  ) -> dict[str, Any]:
    """Returns the sizes of the kernel's plan for a call.

    Args:
      num_units: number of units of heads.
      num_chunks: chunks per row.
      tokens: tokens per chunk, a power of two.
    """
    units = _divisor(num_units, self.units)
    # Targets have tokens on lanes. A step fills the lanes or takes all tokens.
    chunks = max(self.chunks, LANES // tokens)
    chunks = min(chunks, 2 ** math.ceil(math.log2(num_chunks)))
    group = min(self.group, units)
    return {
      "units": units,
      "chunks": chunks,
      "group": group,
      "skew": self.skew,
      "join": self.join,
    }

  def token_sizes(
    self, num_units: int, batch: int, unit: Any
  ) -> dict[str, Any]:
    """Returns the sizes of the kernel's plan with gradients per token.

    Args:
      num_units: number of units of heads per row.
      batch: number of rows.
      unit: sizes of a unit of heads, a `pallas_tpu.plan.UnitSizes`.
    """
    most = LANES // (2 * unit.heads)  # both passes of a unit
    memories = 4 * unit.slots * sum(unit.widths)
    most = min(most, max(_MEMORIES_BYTES // memories, 1))
    units = _divisor(num_units, min(self.units, most))
    rows = _divisor(batch, min(self.rows, most // units))
    return {
      "units": units,
      "rows": rows,
      "chunks": 1,
      "group": min(self.group, units * rows),
      "skew": self.skew,
      "join": self.join,
    }


# Chosen by static cycle counts (benchmarks/tpu_static.py).
FORWARD = KernelTiling(units=6, chunks=8, group=2, skew=2, join=True)
BACKWARD = KernelTiling(units=6, chunks=2, group=1, skew=1, join=True)
_BY_KIND = {
  # A fused matmul is slower on this chip, where it takes two passes.
  ("backward", "v5e"): KernelTiling(units=6, chunks=2, group=1, skew=3),
}


TOKEN_FORWARD = KernelTiling(
  units=64, chunks=1, group=16, skew=1, join=True, rows=64
)
TOKEN_BACKWARD = KernelTiling(
  units=64, chunks=1, group=1, skew=3, join=True, rows=64
)


def kernel(
  direction: str, kind: str | None, *, token: bool = False
) -> KernelTiling:
  """Returns the default sizes of a kernel.

  Args:
    direction: "forward" or "backward".
    kind: kind of TPU.
    token: whether gradients are taken per token.
  """
  if token:
    return {"forward": TOKEN_FORWARD, "backward": TOKEN_BACKWARD}[direction]
  default = {"forward": FORWARD, "backward": BACKWARD}[direction]
  return _BY_KIND.get((direction, kind or ""), default)


def _halves(n: int) -> list[int]:
  return [n >> i for i in range(n.bit_length())]


def _divisor(number: int, most: int) -> int:
  """Returns the largest divisor of `number` that is at most `most`."""
  return max(n for n in range(1, most + 1) if number % n == 0)


@options
class Tiling:
  """Performance options of the chunk form; they never change results.

  Attributes:
    tile_time: tokens per tile with gradients per token, >= 1. With chunk-start
      gradients a tile is a chunk. Work within a tile grows with its square,
      work between tiles with the number of tiles. None for 16. TPU kernels use
      the nearest size that fills their lanes.
    solver: solver of the system in a tile with gradients per token. TPU kernels
      always use substitution.
    forward: sizes of the forward TPU kernel; None for the default of the kind
      of TPU.
    backward: sizes of the backward TPU kernel; None for the default of the kind
      of TPU.
    decay: how TPU kernels compute decay ratios. "separable" computes mu_r /
      mu_i, which is cheaper, but overflows where a chunk's decays multiply to
      less than about exp(-80). "safe" never overflows. "auto" decides at run
      time, and is separable where no chunk is below exp(-40).
  """

  tile_time: int | None = option(None, at_least(1))
  solver: solver_lib.Solver = solver_lib.SUBSTITUTION
  forward: KernelTiling | None = None
  backward: KernelTiling | None = None
  decay: str = option("auto", one_of(DECAYS))


DEFAULT = Tiling()


def tile_time(spec: reference.Spec, tiling: Tiling) -> int:
  """Returns tokens per tile: a chunk with chunk-start gradients, else free."""
  return spec.chunk_size if spec.chunked else tiling.tile_time or _TILE_TIME
