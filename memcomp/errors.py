"""Errors that are the user's to fix, as opposed to bugs.

Command-line programs print a `UserError`, and what `explain` has words for, as
one line and exit with `EXIT_BAD_INPUT`; every other exception keeps its
traceback.
"""

import contextlib
import errno
import os
from collections.abc import Iterator

from memcomp import platforms

EXIT_BAD_INPUT = 2
"""Exit code: the input (config, data, checkpoint, disk) needs a fix."""

EXIT_DOES_NOT_FIT = 3
"""Exit code: compiled for devices whose memory it exceeds."""

EXIT_RESUMABLE = 42
"""Exit code: interrupted by a signal, saved; the same command resumes."""

EXIT_DIVERGED = 43
"""Exit code: training was stopped because its numbers stopped being finite."""

EXIT_LOST = 44
"""Exit code: another process of the run died; the same command resumes."""

EXIT_HUNG = 45
"""Exit code: no step ended for `training.watchdog_seconds`."""


class UserError(Exception):
  """Something the user can fix; the message names the cause and the fix."""


class Terminated(BaseException):
  """SIGTERM: a scheduler's Ctrl-C, which no prompt may catch and go on."""


def terminate(*unused: object) -> None:
  """Raises `Terminated`: a handler of SIGTERM."""
  raise Terminated


BAD_JSON = (ValueError, RecursionError)
"""What `json.loads` raises: no JSON, no UTF-8, numbers too long, nested."""

MALFORMED = (
  *BAD_JSON,
  ArithmeticError,
  AssertionError,
  AttributeError,
  LookupError,
  NotImplementedError,
  TypeError,
)
"""What content raises that has other types, names and values than it should."""


@contextlib.contextmanager
def malformed(what: str, fix: str) -> Iterator[None]:
  """Says of content from a disk that it is not what it should be.

  Args:
    what: is read in the block, which does nothing else.
    fix: what to do about it, to end the message with.

  Raises:
    UserError: the block raised one of `MALFORMED`.
  """
  try:
    yield
  except MALFORMED as error:
    raise UserError(
      f"{what} is damaged, or of another version ({type(error).__name__}:"
      f" {_first_line(error)}); {fix}"
    ) from error


_CHECK = "check the path"
_SPACE = "free some space and run the same command again"
_PERMISSION = "change the permission, or choose another place"
_FILES = "raise the limit of open files (ulimit -n)"
_FIXES = {
  errno.ENOSPC: _SPACE,
  errno.EDQUOT: _SPACE,
  errno.EACCES: _PERMISSION,
  errno.EPERM: _PERMISSION,
  errno.EROFS: "choose a place that can be written",
  errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
  errno.EMFILE: _FILES,
  errno.ENFILE: _FILES,
  errno.EIO: "check the disk",
  errno.ENOTDIR: _CHECK,
  errno.ENAMETOOLONG: "choose a shorter name",
  errno.ELOOP: _CHECK,
}
"""Of what libraries in C++ raise too, as errors with the system's text."""

_MEMORY = "use smaller batches, rows, lengths or models, or a larger machine"


def explain(error: BaseException) -> str | None:
  """Returns place, cause and fix in one line; None of a bug.

  Of a `UserError`, of what the machine refused (`reason`), and of a platform
  that it has not (`platforms`).
  """
  if isinstance(error, UserError):
    cause = str(error)
  else:
    cause = platforms.reason(error) or reason(error)
  if cause is None:
    return None
  place = getattr(error, "filename", None)
  line = cause if place is None else f"{os.fsdecode(place)}: {cause}"
  return " ".join(line.split())


def reason(error: BaseException | None) -> str | None:
  """Returns cause and fix of what the machine refused; None of all else.

  A path that cannot be, a full disk, a missing permission, no memory, no
  connection: any `OSError`, also where it caused the error, and texts of the
  system in errors of other libraries.
  """
  caused = True
  for _ in range(10):
    if error is None:
      return None
    if caused and isinstance(error, OSError):
      cause = error.strerror or _first_line(error)
      return f"{cause}; {_FIXES.get(error.errno or 0, _CHECK)}"
    for number, fix in _FIXES.items():
      text = os.strerror(number)
      if getattr(error, "errno", None) == number or text in str(error):
        return f"{text}; {fix}"
    # After the texts of the system: a full disk is "exhausted", too.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
      return f"not enough memory ({_first_line(error)}); {_MEMORY}"
    # What was only being handled when the error came up explains less.
    caused = error.__cause__ is not None
    error = error.__cause__ or error.__context__
  return None


def _first_line(error: BaseException) -> str:
  return (str(error).splitlines() or [type(error).__name__])[0]
