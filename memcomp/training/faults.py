"""How one of several processes ends when it, or another, cannot continue.

The others wait for it in a collective, and JAX's orderly shutdown would wait
for them. So it prints the reason and ends at once. The others notice this and
do the same.
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
# Texts in errors of the coordination service (barriers, heartbeats) and of
# collectives over a network.
_OTHERS = "CoordinationService", "coordination service", "Gloo", "NCCL"


def explain_aborts() -> None:
  """Makes JAX's abort end in one line and `errors.EXIT_LOST`.

  JAX ends a process that has lost the others from a C++ thread, by a fatal log
  and abort(). No exception is raised, `atexit` does not run, and handlers of
  Python's `signal` would run too late. A C handler of SIGABRT does run, in the
  thread that called abort(), without interrupting Python.
  """
  ctypes.CDLL(None).signal(int(signal.SIGABRT), _on_abort)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(_: int) -> None:
  os.write(2, _ABORTED.encode())
  os._exit(errors.EXIT_LOST)


@contextlib.contextmanager
def end_at_once(*, spare: tuple[type, ...] = ()) -> Iterator[None]:
  """Ends this process, if it is one of several, when the block raises.

  Args:
    spare: exceptions that propagate as usual.
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
  """Prints `error` and ends the process without waiting for anything."""
  code, line = _explain(error)
  if line is None:
    traceback.print_exception(error)
  else:
    print(f"error: {' '.join(line.split())}", file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def _explain(error: BaseException) -> tuple[int, str | None]:
  """Returns an exit code and a line; None to print the traceback."""
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
