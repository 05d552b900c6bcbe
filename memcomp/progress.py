"""Shows the progress of a long computation on standard error."""

import sys
import time


class Line:
  """A line that replaces itself on a terminal; one line per 10 s elsewhere."""

  def __init__(self):
    """Starts the clock: the first line is due in 1 s, or in 5 s."""
    self._terminal = sys.stderr.isatty()
    self._next = time.monotonic() + (1 if self._terminal else 5)
    self._open = False

  def due(self) -> bool:
    """Returns whether it is time for the next line."""
    return time.monotonic() >= self._next

  def show(self, text: str) -> None:
    """Prints a line; the next one is due in 0.5 s, or in 10 s."""
    self._next = time.monotonic() + (0.5 if self._terminal else 10)
    start, end = ("\r", "\033[K") if self._terminal else ("", "\n")
    print(start + text, end=end, file=sys.stderr, flush=True)
    self._open = self._terminal

  def clear(self) -> None:
    """Removes the line from a terminal."""
    if self._open:
      print("\r\033[K", end="", file=sys.stderr, flush=True)
    self._open = False


class Progress:
  """Units of work done, and the seconds left.

  Work of less than a second prints nothing.
  """

  def __init__(self, what: str, total: int):
    """Starts the clock; `what` has `total` units of work."""
    self._what = what
    self._total = total
    self._done = 0
    self._first: tuple[float, int] | None = None
    self._line = Line()

  def advance(self, count: int = 1) -> None:
    """Counts finished work; the last unit clears the line."""
    self._done += count
    if self._done >= self._total:
      self._line.clear()
    elif self._first is None:
      self._first = time.monotonic(), self._done
    elif self._line.due():
      self._show(*self._first)

  def _show(self, start: float, done: int) -> None:
    # The first unit is not counted, because it includes compiling.
    seconds = (time.monotonic() - start) / (self._done - done)
    left = seconds * (self._total - self._done)
    self._line.show(
      f"{self._what}: {self._done:,} of {self._total:,}, {left:.0f} s left"
    )
