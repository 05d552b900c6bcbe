"""Errors that the user can fix, as opposed to bugs.

Command-line programs print a `UserError`, and whatever `explain` recognizes, as
one line, and exit with `EXIT_BAD_INPUT`. Every other exception keeps its
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
"""Exit code: the compiled step exceeds the memory of the devices."""

EXIT_RESUMABLE = 42
"""Exit code: stopped, as by a signal, and saved; the same command resumes."""

EXIT_DIVERGED = 43
"""Exit code: training stopped because its numbers were not finite."""

EXIT_LOST = 44
"""Exit code: another process of the run died; the same command resumes."""

EXIT_HUNG = 45
"""Exit code: no step ended for `training.watchdog_seconds`."""


class UserError(Exception):
  """Something the user can fix; the message names the cause and the fix."""


class Terminated(BaseException):
  """SIGTERM, a scheduler's Ctrl-C; no prompt may catch it and continue."""


def terminate(*unused: object) -> None:
  """Handles SIGTERM by raising `Terminated`."""
  raise Terminated


BAD_JSON = (ValueError, RecursionError)
"""What `json.loads` raises: invalid JSON or UTF-8, long numbers, nesting."""

MALFORMED = (
  *BAD_JSON,
  ArithmeticError,
  AssertionError,
  AttributeError,
  LookupError,
  NotImplementedError,
  TypeError,
)
"""What content with unexpected types, names or values raises."""


@contextlib.contextmanager
def malformed(what: str, fix: str) -> Iterator[None]:
  """Reports malformed content of a file.

  Args:
    what: the content that the block reads; the block must do nothing else.
    fix: what to do about it, as the end of the message.

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
"""Fixes by errno. C++ libraries also raise the system's text of each."""

_MEMORY = "use smaller batches, rows, lengths or models, or a larger machine"


def explain(error: BaseException) -> str | None:
  """Returns place, cause and fix in one line; None for a bug.

  It explains a `UserError`, a failure of the machine (`reason`), and a missing
  platform (`platforms`).
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
  """Returns cause and fix of a failure of the machine, else None.

  Such failures are impossible paths, a full disk, missing permissions, memory
  or connection: any `OSError`, also as the cause of the error, and the system's
  texts in errors of other libraries.
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
    # After the system's texts, because a full disk is "exhausted", too.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
      return f"not enough memory ({_first_line(error)}); {_MEMORY}"
    # An error that was only being handled is a weaker explanation.
    caused = error.__cause__ is not None
    error = error.__cause__ or error.__context__
  return None


def _first_line(error: BaseException) -> str:
  return (str(error).splitlines() or [type(error).__name__])[0][:200]
