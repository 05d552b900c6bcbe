"""Stopping at the end of a step when the process is asked to stop."""

import os
import signal
from types import FrameType, TracebackType

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopRequest:
  """Catches SIGTERM and Ctrl-C while it is entered.

  The first sets `requested`; a second Ctrl-C ends the process at once with
  exit code 130 (checkpoints are committed by a rename, so none is half there).

  Attributes:
    requested: name of the signal that came, or "".
  """

  def __init__(self):
    self.requested = ""
    self._before = {}

  def __enter__(self) -> "StopRequest":
    for number in _NAMES:
      self._before[number] = signal.signal(number, self._handle)
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    if self.requested and number == signal.SIGINT:
      os.write(2, b"\naborted; the last checkpoint stays\n")
      os._exit(130)
    self.requested = self.requested or _NAMES[signal.Signals(number)]
    # os.write: print may not be entered again from a handler.
    os.write(
      2,
      f"\n{_NAMES[signal.Signals(number)]}: finishing this step, then saving "
      "(Ctrl-C now aborts at once)\n".encode(),
    )
