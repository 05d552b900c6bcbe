"""What the chunk form needs to know about a memory, and what it computes.

The chunk form cuts a sequence into tiles of tokens and computes each tile with
matrix products. A tile is either a chunk, where the memory's definition has
chunks, or free, which means that its size does not change results.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from memcomp_kernels.math import solver

Memories = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
  """Size of free tiles. It changes the speed, never the results.

  Attributes:
    tile_time: tokens per tile, >= 1. Work within a tile grows with its square,
      work between tiles with the number of tiles.
  """

  tile_time: int = 64

  def __post_init__(self):
    if self.tile_time < 1:
      raise ValueError(f"tile_time={self.tile_time} must be at least 1")


class Engine(NamedTuple):
  """Runs the chunk algebra over all tiles, forward and backward.

  Attributes:
    forward: (form, layout, operands, save) -> (Result, saved). `saved` is a
      pytree of `[tiles, ...]` arrays, the memories before each tile in the
      form that `backward` needs. Without `save` nobody reads it.
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

  Its State is a NamedTuple with `segment_id` int32 `[batch]`. Where chunks are
  part of the memory's definition, it also has `position` int32 `[batch]`, the
  number of tokens since the current chunk started.

  Attributes:
    spec: the memory's options.
    tile_time: tokens per tile. This is the chunk size where chunks are part of
      the definition; otherwise it is free.
    run_tile: (memories, starts, inputs, complete, spec, tiling) -> (memories,
      outputs, stats) for one tile. `inputs` `[batch, heads, tile_time, ...]`
      hold zeros in empty places, which must not change anything. Chunk-start
      gradients are evaluated at `starts`. `complete`, bool `[batch]`, says
      whether a token fills the tile's last place, so that a chunk ends with
      the tile. `stats` are `solver.Stats` `[batch, heads]`, or None.
    memories: fields of the State that every token updates, each a pytree of
      arrays `[batch, heads, ...]`.
    starts: for each of `memories` the State's field that keeps its value at the
      start of the current chunk, or None where no tile reads that value. Empty
      if no tile reads anything of a chunk's start.
    tiling: other performance options of the tile; they never change results.
    prepare: (inputs, spec, tiling) -> what `run_tile` gets in place of inputs.
      It computes everything of a tile that does not depend on the memory. All
      tiles are prepared at once, which leaves little work for the sequential
      loop over tiles. None passes the inputs unchanged.
    engine: what runs all tiles in order; None for `tile_scan`.
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
  """The arguments with respect to which `chunk` is differentiable.

  Attributes:
    memories: the memories before the first token.
    chunk_start: the memories at the start of the chunk that is unfinished
      there.
    reset: the memories that new segments start from.
    inputs: inputs of the call.
    reset_start: the chunk start that belongs to `reset`; None without segments.
      Only `tile_scan` reads it, see `chunked`. Other engines leave its adjoint
      out, which then is zero.
  """

  memories: Memories
  chunk_start: Memories
  reset: Memories
  inputs: Any
  reset_start: Memories | None = None


class Result(NamedTuple):
  """What `chunk` computes; `chunk_start` belongs to the last token's chunk."""

  memories: Memories
  chunk_start: Memories
  outputs: jax.Array
  stats: solver.Stats | None


def sizes(inputs: Any) -> tuple[int, int]:
  """Returns the batch and time of the inputs."""
  batch, time = jax.tree.leaves(inputs)[0].shape[:2]
  return batch, time
