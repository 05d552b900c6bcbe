"""Two processes that are killed, stopped, or lose their disk and checkpoints."""

import os
import signal
import time

import pytest
import runs
import training_cases
import two_processes

from memcomp import errors, integrity
from memcomp.runs import load

LENGTH = (
  "--config.training.steps=48",
  "--config.training.checkpoint_every=4",
  "--heartbeat_seconds=20",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  folder = tmp_path_factory.mktemp("config")
  return training_cases.write_config(folder, training_cases.LEAKY)


def last_line(err):
  """The last that is ours: JAX's own log may come behind it."""
  return [x for x in err.splitlines() if x.startswith("error: ")][-1]


def assert_lost(process):
  """The one that is left ends soon, and says why."""
  begin = time.monotonic()
  code, _, err = two_processes.end(process)
  assert code == errors.EXIT_LOST, err
  assert "another process died" in last_line(err)
  assert "start all again" in last_line(err)
  assert time.monotonic() - begin < 40


def stop_one(both, folder):
  """A process that stands still: the other waits for it in a collective."""
  both[1].send_signal(signal.SIGSTOP)
  code, _, err = two_processes.end(both[0])
  assert code == errors.EXIT_HUNG, err
  line = last_line(err)
  assert line.startswith("error: nothing ended for 6 s after step")
  assert "watchdog_seconds" in line and "same command" in line
  for stacks in (err, (folder / "stacks-0.txt").read_text()):
    assert stacks.count("most recent call first") >= 3
    assert "loop.py" in stacks and "watchdog.py" in stacks
  # Stopped for longer than the watchdog waits, and not hung: it counts looks.
  both[1].send_signal(signal.SIGCONT)
  assert_lost(both[1])
  assert not (folder / "stacks-1.txt").exists()


def kill_in_a_step(both, folder):
  both[1].kill()
  assert_lost(both[0])


def kill_in_a_save(both, folder):
  training_cases.stop_in_a_save(both[0], folder)
  both[0].kill()
  assert_lost(both[1])
  assert training_cases.half_saves(folder)


def damage_the_newest(folder):
  """Flips a bit, or cuts off what has no checksums yet; returns its step."""
  step = runs.latest_step(folder)
  newest = folder / "checkpoints" / str(step)
  files = list((newest / "params").glob("**/d/*"))
  if not (newest / integrity.MANIFEST).exists():
    for file in files:
      os.truncate(file, file.stat().st_size // 2)
    return step
  content = bytearray(files[0].read_bytes())
  content[len(content) // 2] ^= 1
  files[0].write_bytes(content)
  return step


@pytest.mark.slow
def test_a_run_that_meets_every_fault_is_the_run_that_met_none(
  config, tmp_path
):
  whole, folder = tmp_path / "whole", tmp_path / "run"
  for code, _, err in two_processes.ends(
    two_processes.start(config, whole, *LENGTH)
  ):
    assert code == 0, err
  faults = [
    (stop_one, ["--config.training.watchdog_seconds=6"]),
    (kill_in_a_step, []),
    (kill_in_a_save, []),
  ]
  for meet, flags in faults:
    before = two_processes.logged(folder)
    with two_processes.running(config, folder, *LENGTH, *flags) as both:
      two_processes.wait_for_step(both, folder, before + 5)
      meet(both, folder)
  damaged = damage_the_newest(folder)
  (code, out, err), (code_b, _, err_b) = two_processes.ends(
    two_processes.start(config, folder, *LENGTH)
  )
  assert (code, code_b) == (0, 0), err + err_b
  assert f"checkpoints/{damaged} is damaged" in out
  assert f"going on from step {damaged - 4}" in out
  assert not list((folder / "checkpoints").glob("*tmp*"))
  assert training_cases.curve(folder) == training_cases.curve(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("leaky_model")
def test_a_full_disk_ends_both_and_keeps_what_was_saved(config, small_disk):
  folder = small_disk / "run"
  keep = "--config.training.keep_checkpoints=99"
  with two_processes.running(config, folder, *LENGTH, keep) as both:
    found = two_processes.ends(both)
  # Both write; who finds it full first ends the other, unless that does too.
  codes = {code for code, _, _ in found}
  assert codes <= {errors.EXIT_BAD_INPUT, errors.EXIT_LOST}, found
  lines = [last_line(err) for code, _, err in found if code == 2]
  assert lines, found
  for line in lines:
    assert line.startswith("error: cannot write")
    assert "No space left on device; free some space" in line
  assert load.read(folder).meta["config"]["name"] == "tiny"


# Reads fail in the second process alone, after some.
FAILING = """
from memcomp import errors
from memcomp.data import store
read, calls = store.ArrayStore.read, []
def failing(self, *args):
  calls.append(args)
  if len(calls) > 60 and "--process=1" in sys.argv:
    raise errors.UserError("shard 7: cannot be read")
  return read(self, *args)
store.ArrayStore.read = failing
"""


@pytest.mark.slow
def test_an_error_of_one_ends_both_at_once(tmp_path):
  more = training_cases.LEAKY + FAILING
  config = training_cases.write_config(tmp_path, more)
  with two_processes.running(config, tmp_path / "run", *LENGTH) as both:
    code, _, err = two_processes.end(both[1])
    assert (code, err) == (2, "error: shard 7: cannot be read\n")
    assert_lost(both[0])
