"""Prepare that is interrupted or killed, or whose disk is full."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import rotation
from prepare_cases import BYTES, contents, run

from memcomp import errors
from memcomp.data import shards, sources

pytestmark = pytest.mark.usefixtures("no_fsync")

ROOT = pathlib.Path(shards.__file__).parents[2]


def command(corpus, out, *more):
  flags = [f"--source={corpus}", f"--out={out}", "--shard_tokens=2000", *more]
  return [sys.executable, "-m", "memcomp.data.prepare", *flags]


def start(corpus, out, *more):
  return subprocess.Popen(
    command(corpus, out, *more),
    cwd=ROOT,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def wait_for(out, count):
  """Waits until some units are done, but not all."""
  for _ in range(12_000):
    if len(list(out.glob("units/*.json"))) >= count:
      return
    time.sleep(0.005)
  raise AssertionError("prepare does nothing")


@pytest.mark.parametrize(
  ("number", "workers"),
  rotation.cases(
    [
      (signal.SIGKILL, 1),
      (signal.SIGKILL, 2),
      (signal.SIGINT, 2),
      (signal.SIGTERM, 1),
    ],
    [(signal.SIGKILL, 1), (signal.SIGINT, 2)],
  ),
)
def test_interrupted_run_goes_on(number, workers, corpus, tmp_path):
  for attempt in range(20):
    out = tmp_path / f"out{attempt}"
    process = start(corpus, out, f"--workers={workers}")
    wait_for(out, 2)
    # To the whole group, as a terminal does and as lack of memory may.
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=120)
    if not (out / "manifest.json").exists():
      break
    # On a busy machine it may be done before we look: more to do, then.
    for i in range(12):
      more = pathlib.Path(corpus) / f"more{attempt}-{i}.txt"
      more.write_bytes(b"as before, only more of it\n" * 1000)
  if number != signal.SIGKILL:
    assert process.returncode == errors.EXIT_RESUMABLE, said
    assert "the same command goes on" in said
    assert "Traceback" not in said
  with pytest.raises(errors.UserError, match="has not finished"):
    sources.open_source(str(out), BYTES)
  finished = {p: p.stat().st_mtime_ns for p in out.glob("tokens-*.arrayrecord")}
  done = [json.loads(p.read_text()) for p in out.glob("units/*.json")]
  kept = {out / s["file"] for unit in done for s in unit["shards"]}
  assert kept
  run(corpus, out, shard_tokens=2000)
  assert all(path.stat().st_mtime_ns == finished[path] for path in kept)
  run(corpus, tmp_path / "clean", shard_tokens=2000)
  assert contents(out) == contents(tmp_path / "clean")


def children_of(pid):
  path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
  return [int(child) for child in path.read_text().split()]


def is_running(pid):
  try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
  except OSError:
    return False
  return state.split()[0] != "Z"


def workers_of(pid):
  """Its children, without the one that cleans up behind them."""
  found = []
  for child in children_of(pid):
    with contextlib.suppress(OSError):
      command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
      if b"spawn_main" in command:
        found.append(child)
  return found


@pytest.mark.slow
@pytest.mark.parametrize("units_done", rotation.cases([0, 1], [1]))
def test_a_worker_that_is_killed(units_done, corpus, tmp_path):
  """As for want of memory: while it starts, or in the midst of its work."""
  for attempt in range(20):
    out = tmp_path / f"out{attempt}"
    process = start(corpus, out, "--workers=2")
    while not (workers := workers_of(process.pid)):
      assert process.poll() is None, process.communicate()
    if units_done:
      wait_for(out, units_done)
    with contextlib.suppress(ProcessLookupError):  # On a busy machine.
      os.kill(workers[0], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    if process.returncode:
      break
    for i in range(12):
      more = pathlib.Path(corpus) / f"more{attempt}-{i}.txt"
      more.write_bytes(b"as before, only more of it\n" * 1000)
  assert process.returncode == errors.EXIT_BAD_INPUT, said
  assert "a worker was killed" in said and "fewer --workers" in said
  assert "Traceback" not in said
  assert not any(map(is_running, workers))
  run(corpus, out, shard_tokens=2000)
  run(corpus, tmp_path / "clean", shard_tokens=2000)
  assert contents(out) == contents(tmp_path / "clean")


@pytest.mark.slow
def test_workers_leave_with_a_killed_parent(corpus, tmp_path):
  process = start(corpus, tmp_path / "out", "--workers=2")
  wait_for(tmp_path / "out", 1)
  workers = children_of(process.pid)
  process.kill()
  process.wait()
  until = time.monotonic() + 30
  while any(map(is_running, workers)) and time.monotonic() < until:
    time.sleep(0.01)
  assert not any(map(is_running, workers))
  process.communicate(timeout=120)


def test_full_disk(corpus, tmp_path, monkeypatch):
  def refuse(*unused):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", refuse)
  with pytest.raises(
    errors.UserError, match=r"No space left on device.*free space"
  ):
    run(corpus, tmp_path / "out")


def test_killed_worker(corpus, tmp_path, monkeypatch):
  def broken(self, *unused):
    future = concurrent.futures.Future()
    future.set_exception(concurrent.futures.process.BrokenProcessPool())
    return future

  monkeypatch.setattr(concurrent.futures.ProcessPoolExecutor, "submit", broken)
  with pytest.raises(errors.UserError, match="fewer --workers"):
    run(corpus, tmp_path / "out", workers=2, shard_tokens=2000)
