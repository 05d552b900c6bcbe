"""Ends a process whose training makes no progress, and reports where."""

import faulthandler
import os
import pathlib
import sys
import threading
import time

from memcomp import errors

_LOOKS = 10
_SECONDS_TO_WRITE = 10


class Watchdog:
  """Checks, while entered, that `beat` is called regularly.

  It waits forever for the first beat, and for one after `rest`. Later, after
  `seconds` without one, it writes the stack of every thread to stderr and a
  file, and ends the process with `errors.EXIT_HUNG`. An exception would not
  reach a process that hangs in a collective or on a disk. Whoever started the
  run can restart it.
  """

  def __init__(self, seconds: float, file: pathlib.Path):
    """Prepares the watchdog without starting it.

    Args:
      seconds: maximum time between two beats, > 0; 0 disables it.
      file: file for the stacks, created only when needed.
    """
    self._seconds = seconds
    self._file = file
    self._beats = 0
    self._step = 0
    self._left = threading.Event()
    self._thread = threading.Thread(
      target=self._watch, name="watchdog", daemon=True
    )

  def beat(self, step: int) -> None:
    """Reports that training has progressed within this step."""
    self._step = step
    self._beats += 1

  def rest(self) -> None:
    """Waits forever for the next beat: compiling may take long."""
    self._beats = 0

  def __enter__(self) -> "Watchdog":
    if self._seconds:
      self._thread.start()
    return self

  def __exit__(self, *unused) -> None:
    self._left.set()
    if self._seconds:
      self._thread.join()

  def _watch(self) -> None:
    seen = still = 0
    # Count checks instead of time: a process that was suspended for an hour
    # (Ctrl-Z, a sleeping machine) has checked once.
    while not self._left.wait(self._seconds / _LOOKS):
      beats = self._beats
      still = still + 1 if beats and beats == seen else 0
      seen = beats
      if still == _LOOKS:
        self._end()

  def _end(self) -> None:
    faulthandler.dump_traceback(2)
    # In a thread, because the disk may be what hangs.
    writer = threading.Thread(target=self._write, daemon=True)
    writer.start()
    writer.join(_SECONDS_TO_WRITE)
    print(
      f"error: nothing ended for {self._seconds:g} s after step {self._step}"
      f" (stacks above and in {self._file}); the same command goes on from the"
      " newest checkpoint; raise training.watchdog_seconds if a step, a save or"
      " a validation takes so long",
      file=sys.__stderr__,
      flush=True,
    )
    # Other processes check at other times; let them end together with this one.
    time.sleep(self._seconds / _LOOKS)
    os._exit(errors.EXIT_HUNG)

  def _write(self) -> None:
    # Of several processes, only the first has created the run's folder.
    self._file.parent.mkdir(parents=True, exist_ok=True)
    with open(self._file, "w") as file:
      faulthandler.dump_traceback(file)
