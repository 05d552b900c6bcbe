"""Errors of the disk, told in one line."""

import contextlib
import os
import pathlib
import secrets
import shutil
import time
from collections.abc import Iterator

from memcomp import errors, lock


@contextlib.contextmanager
def clear_errors(what: str) -> Iterator[None]:
  """Turns what the machine refuses (`errors.reason`) into a UserError.

  Args:
    what: was being done, to begin the message with.

  Raises:
    UserError: a path that cannot be, a full disk, a missing permission and so
      on; every other exception passes.
  """
  try:
    yield
  except errors.UserError:
    raise
  except Exception as error:
    message = errors.reason(error)
    if message is None:
      raise
    raise errors.UserError(f"{what}: {message}") from error


def check_place(path: str | os.PathLike) -> None:
  """Raises UserError if nothing can be at `path`, by what stands above it."""
  with (
    clear_errors(f"cannot write {os.fspath(path)}"),
    contextlib.suppress(FileNotFoundError),
  ):
    os.stat(path)


def require_free(out: pathlib.Path) -> None:
  """Raises UserError if there is something at `out`, or cannot be."""
  check_place(out)
  if os.path.lexists(out):  # A link that leads nowhere is in the way, too.
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
    UserError: `out` is there, or another process is writing it; no space or
      permission.
  """
  require_free(out)
  partial = out.with_name(f".{out.name}.partial")
  with clear_errors(f"cannot write {out}"):
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.with_name(f".{out.name}.lock"), f"{out} is being written"):
      require_free(out)  # Another process may just have made it.
      _remove(partial)
      partial.mkdir()
      try:
        yield partial
        os.rename(partial, out)
      except BaseException:
        _remove(partial)
        raise


def _remove(folder: pathlib.Path) -> None:
  """Removes a folder, in which threads of a failed save may still write."""
  for _ in range(40):
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
      return
    time.sleep(0.05)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Replaces a file by one that is whole, whoever else replaces it.

  Args:
    path: of the file.

  Yields:
    A path beside it to write to, which becomes `path` at the end and is removed
    if anything is raised.
  """
  temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
  try:
    yield temporary
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def locked(
  path: pathlib.Path, what: str, *, wait_seconds: float = 0
) -> Iterator[None]:
  """Holds a lock, see `lock.hold`.

  Args:
    path: of the file to lock.
    what: is so while another process holds it, to begin the message with.
    wait_seconds: for another process to release it.

  Raises:
    UserError: another process holds it; no space or permission.
  """
  with contextlib.ExitStack() as stack:
    try:
      with clear_errors(f"cannot write {path.parent}"):
        stack.enter_context(lock.hold(path, wait_seconds=wait_seconds))
    except lock.HeldError as error:
      raise errors.UserError(
        f"{what} by {error}; wait for it, or name another folder"
      ) from error
    yield
