"""Errors of the disk, told in one line."""

import contextlib
import errno
import os
import pathlib
import shutil
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


def require_free(out: pathlib.Path) -> None:
  """Raises UserError if there is something at `out`."""
  if out.exists():
    raise errors.UserError(f"{out} is there already; name a new folder")


@contextlib.contextmanager
def new_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a folder that is whole or absent.

  Args:
    out: the folder to make, absolute.

  Yields:
    A folder beside it to write into, which becomes `out` at the end and is
    removed if anything is raised. What a killed process left of one goes too.

  Raises:
    UserError: `out` is there; no space or permission.
  """
  require_free(out)
  partial = out.with_name(f".{out.name}.partial")
  with clear_errors(f"cannot write {out}"):
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
      yield partial
      os.rename(partial, out)
    except BaseException:
      shutil.rmtree(partial, ignore_errors=True)
      raise


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
