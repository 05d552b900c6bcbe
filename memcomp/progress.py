"""Shows the progress of a long computation on standard error."""

import sys
import time


class Progress:
  """A line that updates itself on a terminal; one line per 10 s elsewhere.

  Work of less than a second prints nothing.
  """

  def __init__(self, what: str, total: int):
    """Starts the clock; `what` has `total` units of work."""
    self._what = what
    self._total = total
    self._done = 0
    self._first: tuple[float, int] | None = None
    self._terminal = sys.stderr.isatty()
    self._next = time.monotonic() + (1 if self._terminal else 5)
    self._shown = False

  def advance(self, count: int = 1) -> None:
    """Counts finished work; the last unit clears the line."""
    self._done += count
    now = time.monotonic()
    if self._done >= self._total:
      if self._shown and self._terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    elif self._first is None:
      self._first = now, self._done
    elif now >= self._next:
      self._next = now + (0.5 if self._terminal else 10)
      self._show(now, *self._first)

  def _show(self, now: float, start: float, done: int) -> None:
    self._shown = True
    # The first unit is not counted, because it includes compiling.
    left = (now - start) / (self._done - done) * (self._total - self._done)
    line = f"{self._what}: {self._done:,} of {self._total:,}, {left:.0f} s left"
    before, end = ("\r", "\033[K") if self._terminal else ("", "\n")
    print(before + line, end=end, file=sys.stderr, flush=True)
