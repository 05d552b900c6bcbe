"""Shows the progress of `memcomp.data.prepare` on standard error."""

import sys
import time

from memcomp import progress
from memcomp.data import units


class PrepareProgress:
  """Files and tokens so far, tokens per second, and the seconds left."""

  def __init__(
    self, corpus: units.Corpus, work: list[units.Unit], todo: list[units.Unit]
  ):
    """Starts the clock.

    Args:
      corpus: the corpus.
      work: all of its units.
      todo: units that earlier runs have not finished.
    """
    self._files = len(corpus.files)
    self._left = {p.file: 0 for unit in todo for p in unit.parts}
    for unit in todo:
      for part in unit.parts:
        self._left[part.file] += 1
    self._todo = sum(unit.size for unit in todo)
    self._done = 0
    self._tokens = 0
    self._start = time.monotonic()
    self._line = progress.Line()
    if len(todo) < len(work):
      print(
        f"prepare: {len(work) - len(todo)} of {len(work)} parts are done "
        "already",
        file=sys.stderr,
      )

  def add(self, tokens: int) -> None:
    """Counts tokens of a document."""
    self.set(self._tokens + tokens)

  def set(self, tokens: int) -> None:
    """Sets the number of tokens so far; prints from time to time."""
    self._tokens = tokens
    if self._line.due():
      self._show()

  def finished(self, unit: units.Unit) -> None:
    """Counts a finished unit."""
    self._done += unit.size
    for part in unit.parts:
      self._left[part.file] -= 1

  def close(self, summary: str) -> None:
    """Prints the last line."""
    self._line.clear()
    seconds = time.monotonic() - self._start
    rate = self._tokens / max(seconds, 1e-9)
    print(
      f"prepare: {summary}; {self._tokens:,} of them now, in "
      f"{seconds:.1f} s ({rate:,.0f} tokens/s)",
      file=sys.stderr,
    )

  def _show(self):
    seconds = time.monotonic() - self._start
    files = self._files - sum(left > 0 for left in self._left.values())
    left = "?"
    if self._done:
      left = f"{seconds * (self._todo - self._done) / self._done:.0f} s"
    self._line.show(
      f"prepare: {files:,} of {self._files:,} files, {self._tokens:,} tokens, "
      f"{self._tokens / seconds:,.0f} tokens/s, {left} left"
    )
