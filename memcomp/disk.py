"""Disk access with errors of one line, and atomic writes."""

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
  """Turns failures of the machine (`errors.reason`) into a UserError.

  Args:
    what: the failed action, as the beginning of the message.

  Raises:
    UserError: an impossible path, a full disk, a missing permission and so on;
      other exceptions pass.
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
  """Raises UserError if the parents of `path` make it impossible."""
  with (
    clear_errors(f"cannot write {os.fspath(path)}"),
    contextlib.suppress(FileNotFoundError),
  ):
    os.stat(path)


def require_free(out: pathlib.Path) -> None:
  """Raises UserError if `out` exists or is impossible."""
  check_place(out)
  if os.path.lexists(out):  # A link that leads nowhere is in the way, too.
    raise errors.UserError(f"{out} is there already; name a new folder")


@contextlib.contextmanager
def new_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
  """Creates a folder completely or not at all.

  Args:
    out: absolute path of the folder to create.

  Yields:
    A temporary folder to write into. It becomes `out` at the end, and is
    removed after an exception. What a killed process left behind is removed,
    too.

  Raises:
    UserError: `out` exists, or another process is writing it; no space or
      permission.
  """
  require_free(out)
  partial = out.with_name(f".{out.name}.partial")
  with clear_errors(f"cannot write {out}"):
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out.with_name(f".{out.name}.lock"), f"{out} is being written"):
      require_free(out)  # another process may just have created it
      _remove(partial)
      partial.mkdir()
      try:
        yield partial
        os.rename(partial, out)
      except BaseException:
        _remove(partial)
        raise


def _remove(folder: pathlib.Path) -> None:
  """Removes a folder in which threads of a failed save may still write.

  They make their folders anew, so it has to stay away for a moment.
  """
  for _ in range(20):
    if not folder.exists():
      return
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.1)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Replaces a file atomically, also if other processes replace it.

  Args:
    path: the file.

  Yields:
    A temporary path to write to. It becomes `path` at the end, and is removed
    after an exception.
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
    path: the file to lock.
    what: what the other process is doing, as the beginning of the message.
    wait_seconds: time to wait for another process to release it.

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
