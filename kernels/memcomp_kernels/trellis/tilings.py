"""Sizes that change the speed of Trellis, never its result."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.trellis import reference

if TYPE_CHECKING:
  from memcomp_kernels.trellis.pallas_tpu import plan as layout

DECAYS = ("auto", "separable", "safe")

_LANES = 128

_MEMORIES_BYTES = 4 * 2**20  # of a grid step, once; blocks hold eight of them

_TILE_TIME = 16
_TOKEN_TILE = 32  # of TPU kernels, unless heads fill lanes otherwise


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
    rows: of the batch a grid step, at most; of use with gradients per token.
    lane_heads: of a unit that share lanes there, at most, a power of two; None
      for all. With fewer a step takes more heads, and cheaper moves.
  """

  units: int
  chunks: int
  group: int
  skew: int
  join: bool = False
  rows: int = 1
  lane_heads: int | None = None

  def __post_init__(self):
    for name in ("units", "chunks", "group", "skew", "rows"):
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
    units = _divisor(num_units, self.units)
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

  def token_sizes(
    self, num_units: int, batch: int, unit: "layout.Unit"
  ) -> dict[str, Any]:
    """As `sizes`, with gradients per token.

    Args:
      num_units: of heads, a row.
      batch: rows.
      unit: of heads.
    """
    lane_heads = min(self.lane_heads or unit.heads, unit.heads)
    most = _LANES // (2 * lane_heads)  # both passes of a unit
    memories = 4 * unit.slots * sum(unit.widths)
    most = min(most, max(_MEMORIES_BYTES // memories, 1))
    units = _divisor(num_units, min(self.units, most))
    rows = _divisor(batch, min(self.rows, most // units))
    return {
      "units": units,
      "rows": rows,
      "lane_heads": lane_heads,
      "chunks": 1,
      "group": min(self.group, units * rows),
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


TOKEN_FORWARD = KernelTiling(
  units=64, chunks=1, group=16, skew=1, join=True, rows=64
)
TOKEN_BACKWARD = KernelTiling(
  units=64, chunks=1, group=1, skew=3, join=True, rows=64
)


def kernel(
  direction: str, kind: str | None, *, token: bool = False
) -> KernelTiling:
  """The sizes of a kernel.

  Args:
    direction: "forward" or "backward".
    kind: of TPU.
    token: whether it takes gradients per token.
  """
  if token:
    return {"forward": TOKEN_FORWARD, "backward": TOKEN_BACKWARD}[direction]
  default = {"forward": FORWARD, "backward": BACKWARD}[direction]
  return _BY_KIND.get((direction, kind or ""), default)


def _divisor(number: int, most: int) -> int:
  """The largest divisor of `number` up to `most`."""
  return max(n for n in range(1, most + 1) if number % n == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """How the chunk form is laid out.

  Attributes:
    tile_time: tokens a tile with gradients per token, >= 1; with stale ones a
      tile is a chunk. Work in a tile grows with its square, work between tiles
      with the number of tiles. None for 16. TPU kernels take the nearest that
      fills their lanes.
    solver: of the system in a tile with gradients per token; TPU kernels
      always substitute.
    forward: of the TPU kernel; None for what suits the kind of TPU.
    backward: likewise.
    decay: of TPU kernels: "separable" (mu_r / mu_i, cheaper; overflows where a
      chunk's decays multiply to less than about exp(-80)), "safe", or "auto":
      separable where no chunk is below exp(-40), decided at run time.
  """

  tile_time: int | None = None
  solver: solver_lib.Solver = dataclasses.field(
    default_factory=solver_lib.Solver
  )
  forward: KernelTiling | None = None
  backward: KernelTiling | None = None
  decay: str = "auto"

  def __post_init__(self):
    if self.tile_time is not None and self.tile_time < 1:
      raise ValueError(f"tile_time={self.tile_time} must be at least 1")
    if self.decay not in DECAYS:
      choices = ", ".join(DECAYS)
      raise ValueError(f"decay={self.decay!r} is not one of: {choices}")


def tile_time(spec: reference.Spec, tiling: Tiling) -> int:
  """Tokens a tile: the chunk where that is meaning, else free."""
  return spec.chunk_size if spec.stale else tiling.tile_time or _TILE_TIME


def unit(
  spec: reference.Spec,
  heads: int,
  key_dim: int,
  value_dim: int,
  tile: int | None = None,
) -> "layout.Unit":
  """As many heads side by side as fill 128 lanes, of those that divide heads.

  Args:
    spec: the memory's meaning.
    heads: of a row.
    key_dim: width of keys.
    value_dim: width of values.
    tile: tokens wanted, with gradients per token; None for what suits best.

  Raises:
    NotImplementedError: no number of heads does; says why.
  """
  if reason := unsupported(spec, heads, key_dim, value_dim):
    raise NotImplementedError(f"trellis mosaic_tpu: {reason}")
  if spec.stale:
    tokens = spec.chunk_size
    together = _heads(spec, heads, key_dim, value_dim)
  else:
    together = _token_heads(heads, key_dim, value_dim, tile)
    tokens = _LANES // together
  # Pallas, which only kernels need, takes long to import.
  from memcomp_kernels.trellis.pallas_tpu import plan as layout

  return layout.Unit(
    heads=together,
    tokens=tokens,
    slots=spec.num_slots,
    key_dim=key_dim,
    value_dim=value_dim,
  )


def _heads(spec, heads, key_dim, value_dim) -> int:
  """Heads of a unit; 0 if none will do."""
  wanted = max(_LANES // min(key_dim, value_dim, spec.chunk_size), 1)
  fitting = [n for n in _fitting(heads, key_dim, value_dim) if n <= wanted]
  return max(fitting, default=0)


def _token_heads(heads, key_dim, value_dim, tile) -> int:
  """As `_heads`, with gradients per token: their tiles fill 128 lanes."""
  wanted = _LANES / (tile or _TOKEN_TILE)
  fitting = [n for n in _fitting(heads, key_dim, value_dim) if n > 1]
  return min(fitting, key=lambda n: abs(n - wanted), default=0)


def _fitting(heads, key_dim, value_dim) -> list[int]:
  """Numbers of heads whose keys and values fill lanes."""
  return [
    n
    for n in (1, 2, 4, 8)
    if heads % n == 0
    and (n * key_dim) % _LANES == 0
    and (n * value_dim) % _LANES == 0
  ]


def unsupported(
  spec: reference.Spec, heads: int, key_dim: int, value_dim: int
) -> str | None:
  """Why there is no layout for these sizes, or None."""
  chunk = spec.chunk_size
  if spec.stale and (chunk < 16 or chunk & (chunk - 1)):
    return f"chunk_size={chunk} must be a power of two of at least 16"
  if spec.num_slots % 16:
    return f"num_slots={spec.num_slots} must be a multiple of 16"
  for name, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
    if dim < 16 or dim & (dim - 1):
      return f"{name}={dim} must be a power of two of at least 16"
  least = _LANES // min(key_dim, value_dim)
  if spec.stale:
    together = _heads(spec, heads, key_dim, value_dim)
  else:
    together = _token_heads(heads, key_dim, value_dim, None)
    least = max(least, 2)
  if not together:
    return (
      f"heads={heads} of key_dim={key_dim} and value_dim={value_dim} do not"
      f" fill {_LANES} lanes: heads must divide by {least}"
    )
  return None
