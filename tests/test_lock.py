"""One process holds a lock, with the system's locks and without them."""

import errno
import fcntl
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading

import pytest

from memcomp import disk, errors, lock

ROOT = pathlib.Path(__file__).parents[1]
HOLDER = """
import sys, time
from memcomp import lock
{before}
with lock.hold(sys.argv[1]):
  print("held", flush=True)
  time.sleep(60)
"""
NO_FLOCK = """
import errno, fcntl, os
def flock(*unused):
  raise OSError(errno.{name}, os.strerror(errno.{name}))
fcntl.flock = flock
"""


@pytest.fixture(params=["flock", "ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def system(request, monkeypatch):
  """Locks of the system, or a file system without; Python that does the same."""
  if request.param == "flock":
    return ""

  def flock(*unused):
    number = getattr(errno, request.param)
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(fcntl, "flock", flock)
  return NO_FLOCK.format(name=request.param)


def holder(path, before):
  """A process that holds a lock."""
  process = subprocess.Popen(
    [sys.executable, "-c", HOLDER.format(before=before), path],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  assert process.stdout.readline() == "held\n"
  return process


def owner_file(path):
  return path.with_name(f"{path.name}.owner")


def test_one_holds_it_and_nothing_stays(system, tmp_path):
  path = tmp_path / "lock"
  for _ in range(2):
    with (
      lock.hold(path),
      pytest.raises(lock.HeldError, match=rf"\({os.getpid()} on "),
      lock.hold(path),
    ):
      raise AssertionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_lock_of_another_process(system, tmp_path, number):
  path = tmp_path / "lock"
  process = holder(path, system)
  try:
    with pytest.raises(lock.HeldError, match=f"{process.pid} on"):
      lock.hold(path).__enter__()
    process.send_signal(number)
    if number == signal.SIGKILL:
      # Before it is waited for: it is gone, though its number is still there.
      os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
      with lock.hold(path):
        pass
      assert not list(tmp_path.iterdir())
    else:
      with pytest.raises(lock.HeldError):
        lock.hold(path).__enter__()
  finally:
    process.kill()
    process.communicate()


def test_a_waiting_process_has_its_turn(system, tmp_path):
  """Each adds to what it has read: without the lock some would be lost."""
  path, count = tmp_path / "lock", tmp_path / "count"
  count.write_text("0")

  def add():
    for _ in range(10):
      with lock.hold(path, wait_seconds=60):
        number = int(count.read_text())
        os.sched_yield()
        count.write_text(str(number + 1))

  threads = [threading.Thread(target=add) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert count.read_text() == "40"
  assert [p.name for p in tmp_path.iterdir()] == ["count"]


def left_behind(path, **changes):
  """The file that a process leaves which is killed without the system's locks."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fcntl, "flock", _without)
    with lock.hold(path):
      me = json.loads(owner_file(path).read_text())
  owner_file(path).write_text(json.dumps(me | changes))


@pytest.mark.parametrize(
  "changes", [{"process": 2**22 + 1}, {"started": "12"}, {"process": 2**70}]
)
def test_the_lock_of_a_process_that_is_gone(changes, tmp_path, capsys):
  path = tmp_path / "lock"
  left_behind(path, **changes)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(fcntl, "flock", _without)
    with lock.hold(path):
      assert json.loads(owner_file(path).read_text())["process"] == os.getpid()
  assert not list(tmp_path.iterdir())
  assert (
    "has no file locks (Function not implemented)" in capsys.readouterr().err
  )


@pytest.mark.parametrize("content", ["other host", "", "{}", "[1]", "7"])
def test_a_lock_that_nobody_can_judge_is_named(content, tmp_path, monkeypatch):
  path = tmp_path / "lock"
  left_behind(path, host=f"not-{socket.gethostname()}")
  if content != "other host":
    owner_file(path).write_text(content)
  monkeypatch.setattr(fcntl, "flock", _without)
  with pytest.raises(
    errors.UserError, match=r"in use by a running process.*delete .*lock\.owner"
  ):
    disk.locked(path, "it is in use").__enter__()
  assert owner_file(path).exists()


def test_two_that_find_it_left_behind(tmp_path, monkeypatch):
  """The second must not remove the lock that the first has put there."""
  path = tmp_path / "lock"
  left_behind(path, process=2**22 + 1)
  monkeypatch.setattr(fcntl, "flock", _without)
  kill, held = os.kill, []

  def another(process, number):
    """Comes when this one has asked whether the holder is alive."""
    monkeypatch.setattr(os, "kill", kill)
    held.append(lock.hold(path))
    held[0].__enter__()
    kill(process, number)

  monkeypatch.setattr(os, "kill", another)
  with pytest.raises(lock.HeldError, match=f"{os.getpid()} on"):
    lock.hold(path).__enter__()
  held[0].__exit__(None, None, None)


def test_a_folder_that_cannot_be_written(tmp_path):
  with pytest.raises(OSError, match="No such file"):
    lock.hold(tmp_path / "none" / "lock").__enter__()


def _without(*unused):
  raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_full_disk_is_no_error_of_a_lock(tmp_path):
  """Of what is written under it, which names its place, it may be one."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
  try:
    with lock.hold(tmp_path / "lock"), pytest.raises(lock.HeldError):
      lock._acquire(tmp_path / "lock")
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert not list(tmp_path.iterdir())
