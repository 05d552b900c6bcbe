"""Stops at the end of a step when the process is asked to stop."""

import os
import signal
import sys
import threading

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopRequest:
  """Catches SIGTERM and Ctrl-C while entered.

  The first sets `requested`. A second Ctrl-C ends the process at once with exit
  code 130; a rename commits checkpoints, so none is incomplete.

  Python runs its handlers between two bytecodes of the main thread, which may
  wait minutes for a compilation. But the system's own handler writes to a pipe
  at once, and a thread reads it.

  Attributes:
    requested: name of the signal, or "".
  """

  def __init__(self):
    self.requested = ""
    self._before = {}

  def __enter__(self) -> "StopRequest":
    if threading.current_thread() is not threading.main_thread():
      return self  # only the main thread may install handlers
    read, self._write = os.pipe()
    os.set_blocking(self._write, False)
    self._thread = threading.Thread(
      target=self._watch, args=(read,), name="signals", daemon=True
    )
    self._thread.start()
    self._wakeup = signal.set_wakeup_fd(self._write)
    for number in _NAMES:
      # The handler does nothing, but replaces the default, which would exit.
      self._before[number] = signal.signal(number, lambda *_: None)
    return self

  def __exit__(self, *unused) -> None:
    if not self._before:
      return
    for number, handler in self._before.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._wakeup)
    os.close(self._write)
    self._thread.join()

  def _watch(self, read: int) -> None:
    while number := os.read(read, 1):
      if number[0] in _NAMES:
        self._request(signal.Signals(number[0]))
    os.close(read)

  def _request(self, number: signal.Signals) -> None:
    if self.requested and number == signal.SIGINT:
      print("\naborted; the last checkpoint stays", file=sys.stderr, flush=True)
      os._exit(130)
    print(
      f"\n{_NAMES[number]}: finishing this step, then saving "
      "(Ctrl-C now aborts at once)",
      file=sys.stderr,
      flush=True,
    )
    self.requested = self.requested or _NAMES[number]
