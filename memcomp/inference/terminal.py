"""Showing text as it is made, and Ctrl-C while it is."""

import signal
import sys
import threading


def show(piece: str) -> None:
  """Prints text without a line's end, with what a terminal would obey as ?."""
  if sys.stdout.isatty():
    # A young model makes control characters.
    piece = "".join(
      c if c.isprintable() or c in "\n\t" else "\ufffd" for c in piece
    )
  encoding = sys.stdout.encoding or "utf-8"
  piece = piece.encode(encoding, errors="replace").decode(encoding)
  print(piece, end="", flush=True)


class Interrupt:
  """Catches Ctrl-C while it is entered: the first is noted, a second raises.

  Attributes:
    requested: whether there was one.
  """

  def __init__(self):
    self.requested = False
    self._before = None

  def __enter__(self) -> "Interrupt":
    if threading.current_thread() is threading.main_thread():
      self._before = signal.signal(signal.SIGINT, self._note)
    return self

  def __exit__(self, *unused) -> None:
    if self._before is not None:
      signal.signal(signal.SIGINT, self._before)

  def _note(self, *unused) -> None:
    if self.requested:
      raise KeyboardInterrupt
    self.requested = True
