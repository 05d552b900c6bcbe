"""Sizes that change the speed of Trellis, never its result."""

import dataclasses
import math
from typing import Any

from memcomp_kernels.primitives import triangular
from memcomp_kernels.trellis import _kernel_layout as layout
from memcomp_kernels.trellis import types

DECAYS = ("auto", "separable", "safe")

_LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelTiling:
  """How a TPU kernel is laid out; see `mosaic.schedule`.

  Attributes:
    units: of heads a grid step, at most.
    chunks: of a grid step, at most, or as many as fill 128 lanes with tokens; a
      power of two.
    group: units emitted in lock step.
    skew: stages between two groups.
    join: sums of products as products of concatenations.
  """

  units: int
  chunks: int
  group: int
  skew: int
  join: bool = False

  def __post_init__(self):
    for name in ("units", "chunks", "group", "skew"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    if self.chunks & (self.chunks - 1):
      raise ValueError(f"chunks={self.chunks} must be a power of two")

  def sizes(
    self, num_units: int, num_chunks: int, tokens: int
  ) -> dict[str, Any]:
    """The plan's sizes for a call.

    Args:
      num_units: of heads.
      num_chunks: of a row.
      tokens: of a chunk, a power of two.
    """
    units = max(n for n in range(1, self.units + 1) if num_units % n == 0)
    # Targets have tokens on lanes: a step fills them, or takes all there is.
    chunks = max(self.chunks, _LANES // tokens)
    chunks = min(chunks, 2 ** math.ceil(math.log2(num_chunks)))
    group = min(self.group, units)
    return {
      "units": units,
      "chunks": chunks,
      "group": group,
      "skew": self.skew,
      "join": self.join,
    }


# Chosen by static cycles (benchmarks/tpu_static.py).
FORWARD = KernelTiling(units=6, chunks=8, group=2, skew=2, join=True)
BACKWARD = KernelTiling(units=6, chunks=2, group=1, skew=1, join=True)
_BY_KIND = {
  # One product of two is slower here, where it takes two passes.
  ("backward", "v5e"): KernelTiling(units=6, chunks=2, group=1, skew=3),
}


def kernel(direction: str, kind: str | None) -> KernelTiling:
  """The sizes of a kernel, "forward" or "backward", on a kind of TPU."""
  default = {"forward": FORWARD, "backward": BACKWARD}[direction]
  return _BY_KIND.get((direction, kind or ""), default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """How the chunk form is laid out.

  Attributes:
    tile_time: tokens a tile with gradients per token, >= 1; with stale ones a
      tile is a chunk. Work in a tile grows with its square, work between tiles
      with the number of tiles.
    solver: of the system in a tile with gradients per token.
    forward: of the TPU kernel; None for what suits the kind of TPU.
    backward: likewise.
    decay: of TPU kernels: "separable" (mu_r / mu_i, cheaper; overflows where a
      chunk's decays multiply to less than about exp(-80)), "safe", or "auto":
      separable where no chunk is below exp(-40), decided at run time.
  """

  tile_time: int = 16
  solver: triangular.Solver = dataclasses.field(
    default_factory=triangular.Solver
  )
  forward: KernelTiling | None = None
  backward: KernelTiling | None = None
  decay: str = "auto"

  def __post_init__(self):
    if self.tile_time < 1:
      raise ValueError(f"tile_time={self.tile_time} must be at least 1")
    if self.decay not in DECAYS:
      choices = ", ".join(DECAYS)
      raise ValueError(f"decay={self.decay!r} is not one of: {choices}")


def tile_time(spec: types.Spec, tiling: Tiling) -> int:
  """Tokens a tile: the chunk where that is meaning, else free."""
  return spec.chunk_size if spec.stale else tiling.tile_time


def unit(
  spec: types.Spec, heads: int, key_dim: int, value_dim: int
) -> layout.Unit:
  """As many heads side by side as fill 128 lanes, of those that divide heads.

  Raises:
    NotImplementedError: no number of heads does; says why.
  """
  if reason := unsupported(spec, heads, key_dim, value_dim):
    raise NotImplementedError(f"trellis mosaic_tpu: {reason}")
  return layout.Unit(
    heads=_heads(spec, heads, key_dim, value_dim),
    tokens=spec.chunk_size,
    slots=spec.num_slots,
    key_dim=key_dim,
    value_dim=value_dim,
  )


def _heads(spec, heads, key_dim, value_dim) -> int:
  """Heads of a unit; 0 if none will do."""
  wanted = max(_LANES // min(key_dim, value_dim, spec.chunk_size), 1)
  fitting = [
    n
    for n in (1, 2, 4, 8)
    if n <= wanted
    and heads % n == 0
    and (n * key_dim) % _LANES == 0
    and (n * value_dim) % _LANES == 0
  ]
  return max(fitting, default=0)


def unsupported(
  spec: types.Spec, heads: int, key_dim: int, value_dim: int
) -> str | None:
  """Why there is no layout for these sizes, or None."""
  chunk = spec.chunk_size
  if chunk < 16 or chunk & (chunk - 1):
    return f"chunk_size={chunk} must be a power of two of at least 16"
  if spec.num_slots % 16:
    return f"num_slots={spec.num_slots} must be a multiple of 16"
  for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
    if dim < 16 or dim & (dim - 1):
      return f"{name}={dim} must be a power of two of at least 16"
  if not _heads(spec, heads, key_dim, value_dim):
    return (
      f"heads={heads} of key_dim={key_dim} and value_dim={value_dim} do not"
      f" fill {_LANES} lanes: heads must divide by"
      f" {_LANES // min(key_dim, value_dim)}"
    )
  return None
