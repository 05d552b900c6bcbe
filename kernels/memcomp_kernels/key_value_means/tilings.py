"""Performance options of Key-Value Means; they never change results."""

from typing import NamedTuple

from memcomp_kernels import dispatch
from memcomp_kernels.key_value_means import reference

# Stages shorter than this are not worth a program of their own.
_SHORTEST_STAGE = 4

# Tokens that are laid into tiles at a time if a row has very many segments.
# Memory grows with the square of this number.
PIECE = 32


class Stage(NamedTuple):
  """Tiles `start` to `stop`, which use the first `rows` of the memory."""

  rows: int
  start: int
  stop: int


def adds_by_index() -> bool:
  """Whether tokens are added to their rows by index, not by a product.

  A CPU adds rows by index quickly. A GPU would add them in no fixed order, and
  a TPU one after another. Their matrix units compute the product.
  """
  return dispatch.current_platform() == "cpu"


def tiles_for_packing(whole: int) -> int:
  """Returns the tiles for packed rows that would fill `whole` tiles unpacked.

  Every segment may leave a tile partly empty. Tiles that stay empty cost memory
  for their tokens, but no time.
  """
  return 2 * whole + 2


def stages(
  spec: reference.Spec,
  *,
  capacity: int,
  max_position: int | None,
  time: int,
  num_tiles: int,
) -> list[Stage]:
  """Cuts the tiles of a call into stages where the live rows have doubled.

  Args:
    spec: the memory's options.
    capacity: rows of the state.
    max_position: an upper bound of the tokens that a segment has seen before
      the call, None if unknown.
    time: tokens per row.
    num_tiles: tiles per row.
  """
  if max_position is None:
    return [Stage(capacity, 0, num_tiles)]
  # In tile i, every segment is at most i chunks after the call's first chunk.
  first, last = (
    max_position // spec.chunk_size,
    (max_position + time - 1) // spec.chunk_size,
  )
  live = spec.live_rows(last)
  found: list[Stage] = []
  for tile in range(num_tiles):
    bucket = spec.chunk_size
    while bucket < live[min(first + tile, last)]:
      bucket *= 2
    bucket = min(bucket, capacity)
    if found and (
      found[-1].rows == bucket
      or found[-1].stop - found[-1].start < _SHORTEST_STAGE
    ):
      found[-1] = Stage(bucket, found[-1].start, tile + 1)
    else:
      found.append(Stage(bucket, tile, tile + 1))
  return found
