"""Signals outside of the steps, and of a terminal that is gone."""

import contextlib
import os
import pty
import signal
import subprocess
import sys

import pytest
import rotation
import training_cases

import memcomp.evaluation.run
from memcomp import cli, errors
from memcomp.training import loop, run

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers():
  """As in a program of `cli`."""
  before = signal.getsignal(signal.SIGTERM)
  cli.catch_sigterm()
  yield
  signal.signal(signal.SIGTERM, before)


@pytest.fixture
def config(text, leaky_model):
  config = training_cases.tiny(text)
  config.evaluation.run_after_training = True
  return config


def interrupted_by(number):
  def interrupted(*unused, **more):
    os.kill(os.getpid(), number)
    return ""

  return interrupted


@pytest.mark.parametrize("number", rotation.cases(SIGNALS, [signal.SIGINT]))
def test_while_evaluating(config, tmp_path, monkeypatch, capsys, number):
  with monkeypatch.context() as patch:
    patch.setattr(
      memcomp.evaluation.run, "after_training", interrupted_by(number)
    )
    assert run.run(config, tmp_path / "run") == errors.EXIT_RESUMABLE
  assert "the same command evaluates it" in capsys.readouterr().err
  evaluated = []
  monkeypatch.setattr(
    memcomp.evaluation.run, "after_training", lambda *_: evaluated.append(1)
  )
  assert run.run(config, tmp_path / "run") == 0
  assert evaluated and "all 8 steps are done" in capsys.readouterr().out


@pytest.mark.parametrize("number", rotation.cases(SIGNALS, [signal.SIGTERM]))
def test_when_the_last_step_is_done(config, tmp_path, monkeypatch, number):
  """It is caught, for the step's sake: the evaluation must not begin."""
  train = loop.train

  def interrupted(*arguments):
    code = train(*arguments)
    interrupted_by(number)()
    return code

  monkeypatch.setattr(loop, "train", interrupted)
  monkeypatch.setattr(
    memcomp.evaluation.run, "after_training", lambda *_: pytest.fail("begun")
  )
  assert run.run(config, tmp_path / "run") == errors.EXIT_RESUMABLE
  # Without an evaluation nothing is left to do.
  config.evaluation.run_after_training = False
  assert run.run(config, tmp_path / "other") == 0


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
  ("code", "message"),
  [(130, "interrupted\n"), (42, "interrupted; the same command goes on\n")],
)
def test_a_program_cleans_up(number, code, message, capsys):
  cleaned = []

  def program():
    with contextlib.ExitStack() as stack:
      stack.callback(cleaned.append, 1)
      interrupted_by(number)()

  with pytest.raises(SystemExit) as stop:
    cli.main(program, usage="", argv=["x.py"], interrupted=code)
  assert stop.value.code == code and cleaned
  assert capsys.readouterr().err == "\n" + message


@pytest.mark.slow
def test_sigterm_to_the_evaluation_of_a_run(tmp_path):
  config = training_cases.write_config(tmp_path)
  flags = ("--config.evaluation.run_after_training=True",)
  with training_cases.start(config, tmp_path / "run", *flags) as process:
    while "evaluating" not in (line := process.stdout.readline()):
      assert line, process.communicate()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
  assert process.returncode == errors.EXIT_RESUMABLE, err
  assert "Traceback" not in err and "the same command evaluates it" in err
  code, _, err = training_cases.train(config, tmp_path / "run", *flags)
  assert code == 0, err
  assert (tmp_path / "run/eval/results.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_a_pipe_without_reader(tmp_path, both):
  """A run whose output nobody reads any more saves, and can go on."""
  config = training_cases.write_config(tmp_path, training_cases.LEAKY)
  steps = "--config.training.steps=100000"
  with training_cases.start(config, tmp_path / "run", steps) as process:
    while not (line := process.stdout.readline()).startswith("step"):
      assert line, process.communicate()
    process.stdout.close()
    if both:
      process.stderr.close()
    assert process.wait(timeout=240) == errors.EXIT_RESUMABLE
    if not both:
      err = process.stderr.read()
      assert err.startswith("the output has no reader: saved step "), err
  saved = [int(x.name) for x in (tmp_path / "run/checkpoints").iterdir()]
  assert max(saved) == training_cases.curve(tmp_path / "run")[-1]["step"]


# Writes to its terminal until it is asked to stop, and then to a file.
WRITER = """
import contextlib, fcntl, pathlib, signal, sys, termios, time
from memcomp.training import signals
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
nohup = sys.argv[2:]  # whatever this test itself is run by
signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
stop = signals.StopRequest()
with stop:
  while not stop.requested:
    with contextlib.suppress(OSError):  # before the signal is heard
      print("step", flush=True)
    time.sleep(0.01)
  print("saved", flush=True)
  print("saved", file=sys.stderr, flush=True)
  pathlib.Path(sys.argv[1]).write_text(stop.requested)
"""


@pytest.mark.parametrize("nohup", [[], ["nohup"]])
def test_a_terminal_that_is_gone(tmp_path, nohup):
  """What would be written there is dropped, and the run is saved."""
  terminal, its = pty.openpty()
  with subprocess.Popen(
    [sys.executable, "-c", WRITER, tmp_path / "end", *nohup],
    env=training_cases.environment(),
    stdin=its,
    stdout=its,
    stderr=its,
    start_new_session=True,
  ) as process:
    os.close(its)
    while b"step" not in os.read(terminal, 1000):
      pass
    if nohup:
      process.send_signal(signal.SIGHUP)
      with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
      process.send_signal(signal.SIGTERM)
      process.wait(60)
    os.close(terminal)
  assert process.returncode == 0
  asked = "SIGTERM" if nohup else "SIGHUP"
  assert (tmp_path / "end").read_text() == asked
