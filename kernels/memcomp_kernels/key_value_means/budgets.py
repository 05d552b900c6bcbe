"""How many rows the memory may hold after how many tokens.

A budget is any hashable function of a number of tokens. It is called on the
host, in Python numbers, at every multiple of the chunk size: a floor inside a
compiled program could fall differently from one device to the next.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

Budget = Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class FixedBudget:
  """Always `rows`."""

  rows: int = 256

  def __call__(self, tokens: int) -> int:
    """Returns `rows`."""
    return self.rows


DEFAULT = FixedBudget()


@dataclasses.dataclass(frozen=True)
class PowerLawBudget:
  """max(minimum, floor(scale * tokens ** exponent))."""

  scale: float = 16.0
  exponent: float = 0.5
  minimum: int = 256

  def __call__(self, tokens: int) -> int:
    """Returns the power law's rows."""
    return max(self.minimum, math.floor(self.scale * tokens**self.exponent))


@dataclasses.dataclass(frozen=True)
class SaturatingBudget:
  """max(1, floor(limit * tokens / (limit + tokens)))."""

  limit: int = 1024

  def __call__(self, tokens: int) -> int:
    """Returns the saturating rows."""
    return max(1, math.floor(self.limit * tokens / (self.limit + tokens)))


@functools.lru_cache(maxsize=64)
def table(budget: Budget, chunk_size: int, max_length: int) -> tuple[int, ...]:
  """Returns B(e) at e = chunk_size, 2 chunk_size, ... up to max_length.

  Raises:
    ValueError: naming the budget: it is not a function, does not return whole
      numbers of at least 1, or shrinks.
  """
  if not callable(budget):
    raise ValueError(f"budget={budget!r} must be a function of a token count")
  rows: list[int] = []
  for tokens in range(chunk_size, max_length + 1, chunk_size):
    value = budget(tokens)
    try:
      # A float is welcome where it is whole, as a floor in numpy gives it.
      whole = int(value) if value == int(value) else operator.index(value)
    except (TypeError, ValueError, OverflowError):
      raise ValueError(
        f"budget={budget!r} must return whole numbers, got {value!r} at"
        f" {tokens} tokens"
      ) from None
    if whole < 1:
      raise ValueError(
        f"budget={budget!r} must be at least 1, got {whole} at {tokens} tokens"
      )
    if rows and whole < rows[-1]:
      raise ValueError(
        f"budget={budget!r} must not shrink: {rows[-1]} rows, then {whole} at"
        f" {tokens} tokens"
      )
    rows.append(whole)
  return tuple(rows)


@functools.lru_cache(maxsize=64)
def live_rows(
  budget: Budget,
  chunk_size: int,
  window_chunks: int,
  max_length: int,
  chunks: int,
) -> tuple[int, ...]:
  """Returns the rows that are live while chunk 0, 1, ..., `chunks` is read.

  By the rule of growth, without a cap by the state's capacity: nothing before
  the window is full, then the first chunk's rows, then towards the budget by
  at most one chunk of rows a chunk.
  """
  limits = table(budget, chunk_size, max_length)
  rows = [0] * window_chunks + [chunk_size]
  for chunk in range(window_chunks + 1, chunks + 1):
    limit = limits[min(chunk, len(limits)) - 1]
    left_the_window = (chunk - window_chunks + 1) * chunk_size
    grown = max(rows[-1], min(limit, left_the_window))
    rows.append(min(grown, rows[-1] + chunk_size))
  return tuple(rows[: chunks + 1])
