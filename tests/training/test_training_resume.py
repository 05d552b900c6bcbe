"""train.py in a process of its own, stopped in every way there is."""

import random
import signal
import time

import pytest
import rotation
import runs
import training_cases

from memcomp import errors

FLAGS = ("--config.training.steps=60", "--config.training.checkpoint_every=9")
CASES = {
  "joined": (),
  "carried": (
    "--config.data.packing=stream",
    "--config.training.carry_state",
    "--config.training.accumulation=2",
  ),
}


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
  """Runs that nothing stopped: name -> (config, flags, curve)."""
  made = {}

  def get(name):
    if name not in made:
      folder = tmp_path_factory.mktemp(name)
      config = training_cases.write_config(folder)
      flags = (*FLAGS, *CASES[name])
      code, out, err = training_cases.train(config, folder / "run", *flags)
      assert (code, err) == (0, "")
      lines = [line for line in out.splitlines() if line.startswith("step ")]
      assert len(lines) == 60, "one line a record"
      made[name] = config, flags, training_cases.curve(folder / "run")
      assert len(made[name][2]) == 60
    return made[name]

  return get


def _wait_for_steps(process, count):
  for line in process.stdout:
    count -= line.startswith("step ")
    if count <= 0:
      return
  raise AssertionError(f"too few steps; stderr: {process.stderr.read()}")


def _end(process):
  out, err = process.communicate(timeout=120)
  return process.returncode, out, err


@pytest.mark.parametrize(
  ("name", "kills"),
  rotation.cases(
    [("joined", "aS"), ("joined", "TS"), ("carried", "aS")], [("joined", "TS")]
  ),
)
def test_stopped_at_a_random_moment_and_in_a_save(whole, tmp_path, name, kills):
  """As `kills` says: killed at any moment (a) or in a save (S), or SIGTERM (T)."""
  config, flags, curve = whole(name)
  seed = random.randrange(10**6)
  rng = random.Random(seed)
  for kill in kills:
    with training_cases.start(config, tmp_path / "run", *flags) as process:
      _wait_for_steps(process, rng.randint(1, 20))
      if kill == "T":
        process.terminate()
        code, _, err = _end(process)
        assert code == errors.EXIT_RESUMABLE, (seed, err)
        step = runs.latest_step(tmp_path / "run")
        assert f"SIGTERM: saved step {step} in" in err
        continue
      if kill == "S":
        training_cases.stop_in_a_save(process, tmp_path / "run")
      else:
        time.sleep(rng.uniform(0, 0.2))
      process.kill()
      assert _end(process)[0] in (-signal.SIGKILL, 0)
  code, _, err = training_cases.train(config, tmp_path / "run", *flags)
  assert code == 0, (seed, err)
  assert training_cases.curve(tmp_path / "run") == curve, seed


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(whole, tmp_path, number):
  config, flags, curve = whole("joined")
  folder = tmp_path / "run"
  with training_cases.start(config, folder, *flags) as process:
    _wait_for_steps(process, 20)
    process.send_signal(number)
    code, _, err = _end(process)
  assert code == errors.EXIT_RESUMABLE, err
  name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
  stopped = runs.latest_step(folder)
  assert stopped >= 20
  *_, last = err.splitlines()
  assert last.startswith(f"{name}: saved step {stopped} in")
  assert "same command goes on" in last
  assert training_cases.curve(folder) == curve[:stopped]
  code, out, err = training_cases.train(config, folder, *flags)
  assert code == 0, err
  assert f"going on from step {stopped}" in out
  assert training_cases.curve(folder) == curve


@pytest.mark.slow
def test_two_times_ctrl_c_ends_it_at_once(whole, tmp_path):
  config, flags, _ = whole("joined")
  # Steps of seconds, so that the second comes while the first waits for one.
  slow = ("--config.training.batch_size=4096", "--config.data.prefetch=0")
  with training_cases.start(config, tmp_path / "run", *flags, *slow) as process:
    _wait_for_steps(process, 1)
    process.send_signal(signal.SIGINT)
    while "finishing this step" not in process.stderr.readline():
      assert process.poll() is None
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    code, _, err = _end(process)
  assert code == 130, err
  assert time.monotonic() - start < 5
  assert "aborted" in err and "Traceback" not in err
