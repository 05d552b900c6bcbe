"""Locks between processes, of this machine and of others on a shared disk.

A lock is a file with the name of its holder in it. The system's own lock on
that file (`flock`) ends with the process, however that ends. Some network disks
and containers have no `flock`. There a second file, which only one process can
create, takes its place. It says who created it: the host, the process, and when
that process started. If that process is gone, so is the lock.
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
  """Another process has the lock; the message says which."""


@contextlib.contextmanager
def hold(path: str | os.PathLike, *, wait_seconds: float = 0) -> Iterator[None]:
  """Holds a lock while it is entered.

  Args:
    path: of the file to lock; it is created, and removed at the end.
    wait_seconds: how long to wait for another process to release it.

  Raises:
    HeldError: another process still has it.
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
    path: of the file that is locked.
    wait_seconds: for the file, which a shared disk may show late.

  Returns:
    The same text for all who see the same file; None if there is no such file.
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
  """Returns what releases the lock when it is closed."""
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
      # The holder before has removed it since it was opened here.
      stack.close()
      return _acquire(path)
    with contextlib.suppress(OSError):  # A full disk: the lock holds.
      file.truncate(0)
      file.write(_me())
      file.flush()
    # Removed before it is unlocked: who locks a removed file looks again.
    stack.callback(_remove, path)
  except BaseException:
    stack.close()
    raise
  return stack


def _flock(file: TextIO) -> OSError | None:
  """Locks a file; returns why it could not."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    return error
  return None


def _create(own: pathlib.Path, reason: str | None) -> None:
  """Creates the file that stands for a lock, in place of one left behind."""
  holder = _read(own)
  if holder is not None and not _is_alive(holder):
    _remove_left_behind(own)
  try:
    with open(own, "x", encoding="utf-8") as file:
      file.write(_me())
  except FileExistsError:
    # From nothing: that the file exists is not what a reader must mend.
    raise HeldError(
      f"{_name(_read(own))}; if that process is gone, delete {own}"
    ) from None
  _tell(own, reason)


@functools.cache  # Once is enough.
def _tell(own: pathlib.Path, reason: str | None) -> None:
  print(
    f"note: {own.parent} has no file locks ({reason}); {own.name} keeps other"
    " processes out",
    file=sys.stderr,
    flush=True,
  )


def _remove_left_behind(own: pathlib.Path) -> None:
  """Removes the lock of a process that is gone.

  Several processes may find it. One at a time looks again and removes it, or
  the second would remove the new lock of the first.
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
  """Returns who wrote the file, None if it does not say."""
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
  """Whether a process runs; one of another machine is taken to."""
  if holder["host"] != socket.gethostname():
    return True
  try:
    os.kill(holder["process"], 0)
  except (ProcessLookupError, OverflowError):
    return False
  except PermissionError:
    pass  # It is another user's.
  # The number may belong to a new process by now.
  started = _started(holder["process"])
  return started is None or started == holder.get("started")


def _started(pid: int) -> str | None:
  """Returns when a process started, None where the system does not say."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  # Behind the name in brackets stand the state and, as the 20th, the start.
  fields = stat.rpartition(")")[2].split()
  return "ended" if fields[0] in ("Z", "X") else fields[19]


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
  """Whether an open file is the one that has this path."""
  try:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))
  except FileNotFoundError:
    return False
