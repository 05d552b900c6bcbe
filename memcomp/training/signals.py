"""Stops at the end of a step when the process is asked to stop."""

import contextlib
import os
import signal
import stat
import sys
import threading

NAMES = {
  signal.SIGINT: "Ctrl-C",
  signal.SIGTERM: "SIGTERM",
  signal.SIGHUP: "SIGHUP",  # the terminal is gone, as when ssh loses its host
}
"""Signals that ask a run to stop."""


def caught() -> list[signal.Signals]:
  """Those of `NAMES` to catch: all but SIGHUP where `nohup` ignores it."""
  ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  return [x for x in NAMES if not (ignored and x == signal.SIGHUP)]


class StopRequest:
  """Catches SIGTERM, SIGHUP and Ctrl-C while entered.

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
    for number in caught():
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
      if number[0] in NAMES:
        self._request(signal.Signals(number[0]))
    os.close(read)

  def _request(self, number: signal.Signals) -> None:
    if self.requested:
      if number != signal.SIGINT:
        return
      with contextlib.suppress(OSError):
        print(
          "\naborted; the last checkpoint stays", file=sys.stderr, flush=True
        )
      os._exit(130)
    with contextlib.suppress(OSError):  # where nobody reads it any more
      print(
        f"\n{NAMES[number]}: finishing this step, then saving "
        "(Ctrl-C now aborts at once)",
        file=sys.stderr,
        flush=True,
      )
    if number == signal.SIGHUP:
      _leave_terminal()
    self.requested = NAMES[number]  # last: who sees it may print


def _leave_terminal() -> None:
  """Drops output to a terminal: to one that is gone, it would fail."""
  with open(os.devnull, "w") as nowhere:
    for descriptor in (1, 2):
      if stat.S_ISCHR(os.fstat(descriptor).st_mode):
        os.dup2(nowhere.fileno(), descriptor)
