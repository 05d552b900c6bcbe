"""Streaming output, and Ctrl-C during it."""

import signal
import sys
import threading


def show(piece: str) -> None:
  """Prints text without a line break; replaces control characters."""
  if sys.stdout.isatty():
    # A model in early training produces control characters.
    piece = "".join(
      c if c.isprintable() or c in "\n\t" else "\ufffd" for c in piece
    )
  encoding = sys.stdout.encoding or "utf-8"
  piece = piece.encode(encoding, errors="replace").decode(encoding)
  print(piece, end="", flush=True)


class Interrupt:
  """Catches Ctrl-C while entered: notes the first, raises at the second.

  Attributes:
    requested: whether Ctrl-C was pressed.
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
