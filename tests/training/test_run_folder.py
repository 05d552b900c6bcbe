"""A run's folder: whose it is, and whether a run may begin or go on there."""

import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
import runs
import training_cases

from memcomp import config as config_lib
from memcomp import errors
from memcomp.runs import claims
from memcomp.training import checkpoint, metrics, run, signals

pytestmark = pytest.mark.usefixtures("leaky_model")


@pytest.fixture
def config(text):
  return training_cases.tiny(text)


def _contents(folder):
  return {
    str(p.relative_to(folder)): p.read_bytes()
    for p in folder.rglob("*")
    if p.is_file()
  }


def workdir_of(folder, config):
  with claims.claim(folder, config):
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.mark.parametrize(
  ("path", "value", "what"),
  [
    ("model.d_model", 64, "another model"),
    ("model.mixers.memory.num_slots", 8, "another model"),
    ("model.mixers.memory.phi", "silu", "another model"),
    ("training.steps", 9, "another config"),
    ("training.batch_size", 8, "another config"),
    ("optimizer.learning_rate", 1e-4, "another config"),
    ("data.sequence_length", 32, "another config"),
    ("seed", 1, "another config"),
  ],
)
def test_a_workdir_of_another_run_is_left_alone(
  tmp_path, config, path, value, what
):
  folder = tmp_path / "a"
  workdir_of(folder, config)
  before = _contents(folder)
  training_cases.set_field(config, path, value)
  with pytest.raises(errors.UserError) as error:
    run.run(config, folder)
  message = str(error.value)
  assert what in message and f"{path} was " in message
  assert f"is {value!r}" in message and "\n" not in message
  assert _contents(folder) == before


def test_a_checkpoint_of_another_model_under_the_right_config(tmp_path, config):
  run.run(config, tmp_path / "a")
  config.model.mixers["memory"].num_slots = 8
  (tmp_path / "a/config.json").write_text(config_lib.to_json(config))
  before = _contents(tmp_path / "a/checkpoints")
  with pytest.raises(
    errors.UserError, match=r"another model \(model.mixers.memory.num_s"
  ):
    run.run(config, tmp_path / "a")
  assert _contents(tmp_path / "a/checkpoints") == before


def test_a_config_json_that_is_none(tmp_path, config):
  (tmp_path / "a").mkdir()
  (tmp_path / "a/config.json").write_text("{")
  with pytest.raises(errors.UserError, match="is not JSON"):
    run.run(config, tmp_path / "a")


def test_two_runs_in_one_folder(tmp_path, config):
  with (
    claims.claim(tmp_path / "a", config),
    pytest.raises(errors.UserError, match="in use by a running process"),
  ):
    run.run(config, tmp_path / "a")


def test_a_folder_that_is_moved_in_mid_run(tmp_path, config, monkeypatch):
  """What is logged and saved from then on would be lost."""
  config.training.checkpoint_every = 8
  folder, polls = tmp_path / "a", []

  def poll(_):
    polls.append(1)
    if len(polls) == 3:
      folder.rename(tmp_path / "b")

  with monkeypatch.context() as patch:
    patch.setattr(checkpoint.Checkpoints, "poll", poll)
    with pytest.raises(errors.UserError, match="folder was removed or moved"):
      run.run(config, folder)
  assert len(polls) < 6  # long before it would have saved
  assert not folder.exists()
  (tmp_path / "b").rename(folder)
  assert run.run(config, folder) == 0
  logged = metrics.read(folder / "metrics.jsonl")
  assert [x["step"] for x in logged] == list(range(1, 9))


def test_a_folder_by_another_of_its_names(tmp_path, config):
  """It is locked once, whatever it is called."""
  (tmp_path / "here").mkdir()
  (tmp_path / "link").symlink_to("a")
  folder = f"{tmp_path}/here/../a"
  assert run.run(config, folder, checkpoints=tmp_path / "link") == 0
  assert runs.latest_step(tmp_path / "a") == 8


def test_a_stop_names_the_folder_of_the_checkpoints(
  tmp_path, config, monkeypatch, capsys
):
  always = property(lambda self: "SIGTERM", lambda self, value: None)
  monkeypatch.setattr(signals.StopRequest, "requested", always, raising=False)
  place = tmp_path / "elsewhere"
  code = run.run(config, tmp_path / "a", checkpoints=place)
  assert code == errors.EXIT_RESUMABLE
  assert f"SIGTERM: saved step 1 in {place}; " in capsys.readouterr().err
  assert runs.latest_step(place) == 1


def test_checkpoints_that_are_not_where_they_were(tmp_path, config):
  """A run that began anew would lose its log."""
  config.training.checkpoint_every = 2
  place = tmp_path / "elsewhere"
  assert run.run(config, tmp_path / "a", checkpoints=place) == 0
  before = _contents(tmp_path / "a")
  with pytest.raises(errors.UserError, match=r"up to step 8, .*--checkpoints"):
    run.run(config, tmp_path / "a")
  assert _contents(tmp_path / "a") == before
  assert run.run(config, tmp_path / "a", checkpoints=place) == 0


@pytest.mark.parametrize(
  ("every", "last", "lost"),
  [
    (2, {"step": 7, "skipped": 1}, True),
    (2, {"step": 7, "skipped": 4}, False),  # too few that were saved
    (3, {"step": 6, "skipped": 0}, False),  # killed while it saved the first
    (9, {"step": 8, "skipped": 0}, True),  # it had finished
    (0, {"step": 7, "skipped": 0}, False),
  ],
)
def test_which_logs_had_a_checkpoint(tmp_path, config, every, last, lost):
  config.training.checkpoint_every = every
  with claims.claim(tmp_path, config):
    log = tmp_path / "metrics.jsonl"
    log.write_text(f"{json.dumps(last)}\n")
  check = functools.partial(run._check_lost, tmp_path, tmp_path, [])
  if lost:
    with pytest.raises(
      errors.UserError, match=f"log up to step {last['step']}"
    ):
      check()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/3").touch()
  check()
  (tmp_path / "config.json").unlink()
  for nothing in ("", '{"step": 7, "lo\0\0\n', "{}\n"):
    log.write_text(nothing)
    check()


@pytest.mark.slow
def test_checkpoints_that_cannot_be_written_are_told_at_the_start(tmp_path):
  """As when another user has copied the run."""
  before = ()
  if os.geteuid() == 0:  # whom permissions do not stop
    before = ("setpriv", "--bounding-set=-dac_override,-fowner")
    if shutil.which("setpriv") is None:
      pytest.skip("needs setpriv, or another user than root")
  (tmp_path / "checkpoints").mkdir(mode=0o555)
  program = (
    "import contextlib, sys\nfrom memcomp import cli\n"
    "from memcomp.training import checkpoint\n"
    f"run = checkpoint.Checkpoints({str(tmp_path)!r}, keep=1)\n"
    "with contextlib.closing(run):\n"  # as a run does
    "  sys.exit(cli.guard(run.check_writable))"
  )
  done = subprocess.run(
    [*before, sys.executable, "-c", program],
    env=training_cases.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == errors.EXIT_BAD_INPUT, done.stderr
  (line,) = done.stderr.splitlines()
  assert "cannot write" in line and "checkpoints: Permission denied" in line
