"""Errors of the disk, told in one line."""

import contextlib
import errno
import os
from collections.abc import Iterator

from memcomp import errors

_FIXES = {
  errno.ENOSPC: "free some space and run the same command again",
  errno.EDQUOT: "free some space and run the same command again",
  errno.EACCES: "change the permission, or choose another place",
  errno.EPERM: "change the permission, or choose another place",
  errno.EROFS: "choose a place that can be written",
}


@contextlib.contextmanager
def clear_errors(what: str) -> Iterator[None]:
  """Turns a full disk or a missing permission into a UserError.

  Args:
    what: was being done, to begin the message with.

  Raises:
    UserError: for these; every other exception passes.
  """
  try:
    yield
  except errors.UserError:
    raise
  except Exception as error:
    message = explain(error)
    if message is None:
      raise
    raise errors.UserError(f"{what}: {message}") from error


def explain(error: BaseException | None) -> str | None:
  """Returns cause and fix if `error` comes from a disk's limits, or None."""
  seen = 0
  while error is not None and seen < 10:
    for number, fix in _FIXES.items():
      # Libraries in C++ raise ValueErrors with the system's text in them.
      if getattr(error, "errno", None) == number or (
        os.strerror(number) in str(error)
      ):
        return f"{os.strerror(number)}; {fix}"
    error = error.__cause__ or error.__context__
    seen += 1
  return None
