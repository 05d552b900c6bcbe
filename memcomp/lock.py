"""Locks between processes, of this machine and of others on a shared disk.

A lock is a file that contains the name of its holder. The system's lock on that
file (`flock`) ends with the process, however that ends. Some network disks and
containers have no `flock`. There, a second file replaces it, which only one
process can create. It names its creator: host, process, and start time of the
process. If that process is gone, so is the lock.
"""

import contextlib
import errno
import fcntl
import functools
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_POLL_SECONDS = 0.05


class HeldError(Exception):
  """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def hold(path: str | os.PathLike, *, wait_seconds: float = 0) -> Iterator[None]:
  """Holds a lock while entered.

  Args:
    path: the file to lock; it is created, and removed at the end.
    wait_seconds: time to wait for another process to release it.

  Raises:
    HeldError: another process still holds it.
    OSError: the file cannot be created.
  """
  give_up = time.monotonic() + wait_seconds
  while True:
    try:
      held = _acquire(pathlib.Path(path))
      break
    except HeldError:
      if time.monotonic() >= give_up:
        raise
      time.sleep(_POLL_SECONDS)
  with held:
    yield


def holder(path: str | os.PathLike, *, wait_seconds: float = 0) -> str | None:
  """Returns what the holder of a lock wrote into it.

  Args:
    path: the locked file.
    wait_seconds: time to wait for the file, which a shared disk may show late.

  Returns:
    The same text for all processes that see the same file; None without a file.
  """
  give_up = time.monotonic() + wait_seconds
  while True:
    try:
      return pathlib.Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
      if time.monotonic() >= give_up:
        return None
      time.sleep(_POLL_SECONDS)


def _acquire(path: pathlib.Path) -> contextlib.ExitStack:
  """Locks the file; closing the result releases the lock."""
  stack = contextlib.ExitStack()
  try:
    file = stack.enter_context(path.open("a+", encoding="utf-8"))
    problem = _flock(file)
    if problem is not None:
      if problem.errno in _HELD:
        raise HeldError(_name(_read(path)))
      _create(_owner_file(path), problem.strerror)
      stack.callback(_remove, _owner_file(path))
    elif not _is_at(file.fileno(), path):
      # The previous holder has removed the file since it was opened here.
      stack.close()
      return _acquire(path)
    with contextlib.suppress(OSError):  # the lock holds even on a full disk
      file.truncate(0)
      # Unbuffered, because closing the file would retry a buffered write.
      os.write(file.fileno(), _me().encode())
    # Removed before unlocking: whoever locks a removed file tries again.
    stack.callback(_remove, path)
  except BaseException:
    stack.close()
    raise
  return stack


def _flock(file: TextIO) -> OSError | None:
  """Locks a file; returns the error if it fails."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    return error
  return None


def _create(own: pathlib.Path, reason: str | None) -> None:
  """Creates the file that replaces `flock`, unless its owner is alive."""
  holder = _read(own)
  if holder is not None and not _is_alive(holder):
    _remove_left_behind(own)
  try:
    with open(own, "x", encoding="utf-8") as file:
      file.write(_me())
  except FileExistsError:
    # Hide the cause: that the file exists is not the reader's problem.
    raise HeldError(
      f"{_name(_read(own))}; if that process is gone, delete {own}"
    ) from None
  _tell(own, reason)


@functools.cache  # tell only once
def _tell(own: pathlib.Path, reason: str | None) -> None:
  print(
    f"note: {own.parent} has no file locks ({reason}); {own.name} keeps other"
    " processes out",
    file=sys.stderr,
    flush=True,
  )


def _remove_left_behind(own: pathlib.Path) -> None:
  """Removes the lock of a process that is gone.

  Several processes may find it. Only one at a time checks again and removes it.
  Otherwise the second would remove the new lock of the first.
  """
  turn = own.with_name(f"{own.name}.turn")
  try:
    open(turn, "x").close()
  except FileExistsError:
    raise HeldError(
      f"a process that starts now; if there is none, delete {turn}"
    ) from None
  try:
    holder = _read(own)
    if holder is not None and not _is_alive(holder):
      _remove(own)
  finally:
    _remove(turn)


def _owner_file(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f"{path.name}.owner")


def _remove(path: pathlib.Path) -> None:
  with contextlib.suppress(OSError):
    path.unlink()


def _me() -> str:
  pid = os.getpid()
  return json.dumps(
    {"host": socket.gethostname(), "process": pid, "started": _started(pid)}
  )


def _read(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns who wrote the file; None if it does not say."""
  try:
    holder = json.loads(path.read_text(encoding="utf-8"))
    return holder | {"process": int(holder["process"]), "host": holder["host"]}
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _name(holder: dict[str, Any] | None) -> str:
  if holder is None:
    return "a running process"
  return f"a running process ({holder['process']} on {holder['host']})"


def _is_alive(holder: dict[str, Any]) -> bool:
  """Whether a process runs; assumed for processes of other machines."""
  if holder["host"] != socket.gethostname():
    return True
  try:
    os.kill(holder["process"], 0)
  except (ProcessLookupError, OverflowError):
    return False
  except PermissionError:
    pass  # another user's process
  # A new process may have reused the number.
  started = _started(holder["process"])
  return started is None or started == holder.get("started")


def _started(pid: int) -> str | None:
  """Returns when a process started; None if the system does not say."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  # After the name in brackets: the state first, and the start time 20th.
  fields = stat.rpartition(")")[2].split()
  return "ended" if fields[0] in ("Z", "X") else fields[19]


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
  """Whether an open file is still the one at this path."""
  try:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))
  except FileNotFoundError:
    return False
