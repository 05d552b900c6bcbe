"""Budgets: how many rows the memory may hold after how many tokens.

A budget is any hashable function of a number of tokens. It is called on the
host, in Python numbers, at every multiple of the chunk size. Inside a compiled
program a floor could round differently from one device to the next.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

Budget = Callable[[int], int]


@dataclasses.dataclass(frozen=True)
class FixedBudget:
  """A constant number of rows."""

  rows: int = 256

  def __call__(self, tokens: int) -> int:
    """Returns `rows`."""
    return self.rows


DEFAULT = FixedBudget()


@dataclasses.dataclass(frozen=True)
class PowerLawBudget:
  """A power law: max(minimum, floor(scale * tokens ** exponent))."""

  scale: float = 16.0
  exponent: float = 0.5
  minimum: int = 256

  def __call__(self, tokens: int) -> int:
    """Returns the rows of the power law."""
    return max(self.minimum, math.floor(self.scale * tokens**self.exponent))


@dataclasses.dataclass(frozen=True)
class SaturatingBudget:
  """A saturating curve: max(1, floor(limit * tokens / (limit + tokens)))."""

  limit: int = 1024

  def __call__(self, tokens: int) -> int:
    """Returns the rows of the saturating curve."""
    return max(1, math.floor(self.limit * tokens / (self.limit + tokens)))


@functools.lru_cache(maxsize=64)
def table(budget: Budget, chunk_size: int, max_length: int) -> tuple[int, ...]:
  """Returns B(e) at e = chunk_size, 2 chunk_size, ... up to max_length.

  Raises:
    ValueError: the budget is not a function, does not return whole numbers of
      at least 1, or shrinks; the message names the budget.
  """
  if not callable(budget):
    raise ValueError(
      f"budget={budget!r} must be a function of a token count,"
      " such as FixedBudget(256)"
    )
  rows: list[int] = []
  for tokens in range(chunk_size, max_length + 1, chunk_size):
    value = budget(tokens)
    try:
      # A whole float is accepted, because a floor in numpy returns one.
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

  The count follows the rule of growth, without the cap of the state's capacity.
  There are no rows before the window is full. Then there are the first chunk's
  rows. Each later chunk adds at most one chunk of rows, up to the budget.
  """
  limits = table(budget, chunk_size, max_length)
  rows = [0] * window_chunks + [chunk_size]
  for chunk in range(window_chunks + 1, chunks + 1):
    limit = limits[min(chunk, len(limits)) - 1]
    left_the_window = (chunk - window_chunks + 1) * chunk_size
    grown = max(rows[-1], min(limit, left_the_window))
    rows.append(min(grown, rows[-1] + chunk_size))
  return tuple(rows[: chunks + 1])
