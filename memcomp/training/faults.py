"""How one process of several ends when it, or another, cannot go on.

The others wait for it in a collective, and it would wait for them while JAX
shuts down in order. So it says why and ends at once, and the others, who see it
go, do the same.
"""

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

import jax

from memcomp import errors

_GO_ON = "start all again: they go on from the newest checkpoint"
_ABORTED = (
  "\nerror: JAX aborted this process for the reason above, most likely because"
  f" another process died or could not be reached; {_GO_ON}\n"
)
# In the text of errors of the coordination service (barriers, heartbeats) and
# of collectives over a network.
_OTHERS = "CoordinationService", "coordination service", "Gloo", "NCCL"


def explain_aborts() -> None:
  """Lets JAX's abort end in one line and `errors.EXIT_LOST`.

  A process that has lost the others JAX ends from a thread in C++ (a fatal log,
  then abort()): no exception comes up, nothing of `atexit` runs, and handlers
  of Python's `signal` would run too late. What does run is a C handler of
  SIGABRT, in the thread that called abort(): it interrupts no Python.
  """
  ctypes.CDLL(None).signal(int(signal.SIGABRT), _on_abort)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_: int) -> None:
  os.write(2, _ABORTED.encode())
  os._exit(errors.EXIT_LOST)


@contextlib.contextmanager
def end_at_once(*, spare: tuple[type, ...] = ()) -> Iterator[None]:
  """Ends this process, if it is one of several, with what the block raises.

  Args:
    spare: exceptions that go on as ever.
  """
  try:
    yield
  except spare:
    raise
  except BaseException as error:
    if jax.process_count() == 1:
      raise
    _end(error)


def _end(error: BaseException) -> NoReturn:
  """Prints `error` and ends the process, without waiting for anything."""
  code, line = _explain(error)
  if line is None:
    traceback.print_exception(error)
  else:
    print(f"error: {' '.join(line.split())}", file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def _explain(error: BaseException) -> tuple[int, str | None]:
  """Returns an exit code and a line; None if the traceback is wanted."""
  if isinstance(error, errors.UserError):
    return errors.EXIT_BAD_INPUT, str(error)
  if isinstance(error, (KeyboardInterrupt, errors.Terminated)):
    return errors.EXIT_RESUMABLE, f"interrupted; {_GO_ON}"
  if line := errors.explain(error):
    return errors.EXIT_BAD_INPUT, line
  if isinstance(error, jax.errors.JaxRuntimeError):
    first = str(error).partition("\n")[0]
    if any(word in str(error) for word in _OTHERS):
      line = f"another process died or could not be reached ({first}); {_GO_ON}"
      return errors.EXIT_LOST, line
  return 1, None
