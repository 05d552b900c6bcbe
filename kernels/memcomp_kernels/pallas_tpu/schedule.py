"""Interleaves independent pieces of a kernel's body by hand.

The TPU compiler keeps matmuls in program order. In a body that treats one head
after the other, heads would therefore wait for each other's results. So a piece
(one unit of heads in one chunk) is a generator that yields between its stages.
`run` emits the stages of several pieces in turn.
"""

import collections
from collections.abc import Callable, Generator

READS = "reads"
"""A piece yields this before the stage that first reads its unit's state."""
WROTE = "wrote"
"""A piece yields this after the stage that writes its unit's state."""
MEETS = "meets"
"""A piece yields this where it waits for all others."""

Piece = Generator[str | None]


def run(
  piece: Callable[[int, int], Piece],
  *,
  chunks: range,
  units: int,
  group: int,
  skew: int,
) -> None:
  """Emits all pieces; each unit's state passes from chunk to chunk.

  Args:
    piece: Maps (chunk, unit) to a generator, which yields READS and WROTE once
      each.
    chunks: Chunks, in the order in which they pass the state on.
    units: Number of independent units of heads.
    group: Number of units whose stages are emitted in lock step.
    skew: Stages between the starts of two groups.

  Raises:
    ValueError: A piece ended without WROTE.
  """
  waiting = collections.deque(
    [(chunk, unit) for unit in range(first, min(first + group, units))]
    for chunk in chunks
    for first in range(0, units, group)
  )
  # Chunks that have not written yet. Only the first of them may read.
  unwritten = {unit: collections.deque(chunks) for unit in range(units)}
  live: list[list[list]] = []  # groups of [chunk, unit, generator, last yield]
  stage = 0
  while waiting or live:
    if waiting and (stage % skew == 0 or not live):
      live.append([[*key, piece(*key), None] for key in waiting.popleft()])
    for members in live:
      # Lock step: a group waits if one of its members has to wait.
      if any(
        last == READS and unwritten[unit][0] != chunk
        for chunk, unit, _, last in members
      ):
        continue
      for member in list(members):
        chunk, unit, generator, _ = member
        member[-1] = next(generator, StopIteration)
        if member[-1] == WROTE:
          unwritten[unit].popleft()
        elif member[-1] is StopIteration:
          if chunk in unwritten[unit]:
            raise ValueError("a piece ended without writing its state")
          members.remove(member)
    live = [members for members in live if members]
    stage += 1


def meet(pieces: list[Piece], *, group: int, skew: int) -> None:
  """Emits pieces of one chunk up to their next MEETS, or to their ends.

  Args:
    pieces: Pieces that are independent of each other up to that point.
    group: Number of pieces whose stages are emitted in lock step.
    skew: Stages between the starts of two groups.
  """
  waiting = collections.deque(
    pieces[first : first + group] for first in range(0, len(pieces), group)
  )
  live: list[list[Piece]] = []
  stage = 0
  while waiting or live:
    if waiting and (stage % skew == 0 or not live):
      live.append(waiting.popleft())
    live = [[x for x in members if next(x, MEETS) != MEETS] for members in live]
    live = [members for members in live if members]
    stage += 1
