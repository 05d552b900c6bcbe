"""What the chunk form needs to know of a memory, and what it computes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from memcomp_kernels.math import solver

Memories = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """How a chunk form with free tiles is evaluated: speed, never results.

  Attributes:
    tile_time: tokens per tile, >= 1. Work within a tile grows with its square,
      work between tiles with the number of tiles.
  """

  tile_time: int = 64

  def __post_init__(self):
    if self.tile_time < 1:
      raise ValueError(f"tile_time={self.tile_time} must be at least 1")


class Engine(NamedTuple):
  """Runs laid tokens tile by tile, forward and backward.

  Attributes:
    forward: (form, layout, operands, save) -> (Result, saved). `saved` is a
      pytree of `[tiles, ...]` arrays, the memories before each tile as
      `backward` wants them; what it is without `save` is not read.
    backward: (form, layout, operands, saved, cotangents) -> Operands, with
      `cotangents` a Result without stats.
    as_saved: (form, operands) -> `saved` of the first tile, without the tile
      axis.
  """

  forward: Callable[..., tuple["Result", Any]]
  backward: Callable[..., "Operands"]
  as_saved: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Form:
  """A memory as the chunk form runs it; hashable.

  Its State is a NamedTuple with `segment_id` int32 `[batch]` and, where chunks
  are part of the meaning, `position` int32 `[batch]`, tokens since the current
  one started.

  Attributes:
    spec: the memory's meaning.
    tile_time: tokens a tile: the chunk where that is meaning, else free.
    run_tile: (memories, starts, inputs, complete, spec, tiling) -> (memories,
      outputs, stats) for one tile: `inputs` `[batch, heads, tile_time, ...]`
      hold zeros in empty places, which must change nothing; stale gradients
      are taken at `starts`; `complete`, bool `[batch]`, tells where the tile's
      last place is taken, that is where a chunk ends with the tile; `stats`
      are of `triangular`, `[batch, heads]`, or None.
    memories: fields of the State that the next token changes, each a pytree of
      arrays `[batch, heads, ...]`.
    starts: for each of them the field that keeps it from where the current
      chunk started, or None where no tile reads that; empty where nothing is
      read of a chunk's start.
    tiling: what else of the tile's algebra is speed, never meaning.
    prepare: (inputs, spec, tiling) -> what `run_tile` gets in place of inputs:
      all of a tile that needs no memory. Tiles are prepared all at once, so
      that what follows tile after tile is little. None for the inputs as they
      are.
    engine: what runs all tiles, one after the other; None for `tile_scan`.
  """

  spec: Any
  tile_time: int
  run_tile: Callable[..., tuple[Memories, jax.Array, Any]]
  memories: tuple[str, ...]
  starts: tuple[str | None, ...] = ()
  tiling: Any = None
  prepare: Callable[..., Any] | None = None
  engine: Engine | None = None


class Operands(NamedTuple):
  """What `chunk` is differentiable in.

  Attributes:
    memories: before the first token.
    chunk_start: the memories at the start of the chunk under way there.
    reset: what new segments start from.
    inputs: of the call.
    reset_start: as `chunk_start`, for `reset`; None without segments. Only
      `tile_scan` reads it, see `chunked`; the adjoint that other engines leave
      out is zero.
  """

  memories: Memories
  chunk_start: Memories
  reset: Memories
  inputs: Any
  reset_start: Memories | None = None


class Result(NamedTuple):
  """What `chunk` computes; `chunk_start` is that of the last token's chunk."""

  memories: Memories
  chunk_start: Memories
  outputs: jax.Array
  stats: solver.Stats | None


def sizes(inputs: Any) -> tuple[int, int]:
  """The inputs' batch and time."""
  batch, time = jax.tree.leaves(inputs)[0].shape[:2]
  return batch, time
