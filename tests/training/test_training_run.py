import contextlib
import errno
import json
import os
import shutil
import subprocess
import types

import jax
import numpy as np
import pytest
import rotation
import runs
import training_cases

import memcomp.evaluation
from memcomp import config as config_lib
from memcomp import errors, integrity
from memcomp.data import store as store_lib
from memcomp.training import metrics, run, step

pytestmark = pytest.mark.usefixtures("leaky_model")


@pytest.fixture
def config(text):
  return training_cases.tiny(text)


def _steps(folder):
  return [r["step"] for r in training_cases.curve(folder)]


def test_a_run_leaves_what_it_says(tmp_path, config, capsys, loss_figure):
  config.training.evaluate_every = 4
  config.training.log_every = 3
  assert run.run(config, tmp_path / "a") == 0
  folder = tmp_path / "a"
  assert json.loads((folder / "config.json").read_text()) == json.loads(
    config_lib.to_json(config)
  )
  records = training_cases.curve(folder)
  assert [r["step"] for r in records] == [1, 3, 4, 6, 8]
  assert [r["step"] for r in records if "validation_loss" in r] == [4, 8]
  names = {
    "step",
    "loss",
    "bits_per_byte",
    "learning_rate",
    "grad_norm",
    "memory_norms",
    "skipped",
    "tokens",
    "z_loss",
    "state_bytes",
  }
  assert names <= records[0].keys()
  clocks = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
  assert clocks["tokens_per_second"] > 0 and clocks["mfu"] == "unknown"
  assert clocks["model_tflops_per_second"] > 0
  assert runs.latest_step(folder) == 8
  out = capsys.readouterr().out
  assert "step 8/8" in out and "parameters" in out and "loss" in out
  pytest.importorskip("matplotlib")
  assert (folder / "loss.png").exists()


def slow(*values):
  return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("packing", "fields"),
  [
    ("joined", {"optimizer": "muon"}),
    slow("concat", {}),
    slow("first_fit", {}),
    slow("stream", {}),
    ("stream", {"carry_state": True}),
    slow("joined", {"state_passing": 0.4}),
    slow("first_fit", {"state_passing": 0.4}),
    slow("stream", {"carry_state": True, "state_passing": 0.4}),
  ],
)
def test_resuming_equals_going_on(tmp_path, config, packing, fields):
  config.data.packing = packing
  if "state_passing" in fields and packing == "stream":
    config.data.stretch = 2
  for name, value in fields.items():
    if name == "optimizer":
      config.optimizer.name = value
    else:
      setattr(config.training, name, value)
  config.training.accumulation = 2
  config.training.evaluate_every = 4
  config.training.keep_checkpoints = 9
  run.run(config, tmp_path / "whole")
  whole = training_cases.curve(tmp_path / "whole")
  # As if it had been killed after step 5.
  for name in ("6", "8"):
    shutil.rmtree(tmp_path / "whole/checkpoints" / name)
  with open(tmp_path / "whole/metrics.jsonl", "r+") as file:
    lines = file.readlines()
    file.seek(0)
    file.writelines([*lines[:5], lines[5][:40]])
    file.truncate()
  run.run(config, tmp_path / "whole")
  assert training_cases.curve(tmp_path / "whole") == whole
  assert len(whole) == 8


def test_a_finished_run_only_evaluates(tmp_path, config, capsys, monkeypatch):
  called = []
  fake = types.SimpleNamespace(
    after_training=lambda *arguments: called.append(arguments)
  )
  monkeypatch.setattr(memcomp.evaluation, "run", fake, raising=False)
  run.run(config, tmp_path / "a")
  assert not called
  before = (tmp_path / "a/metrics.jsonl").read_bytes()
  config.evaluation.run_after_training = True
  capsys.readouterr()
  assert run.run(config, tmp_path / "a") == 0
  assert called == [(config, tmp_path / "a", tmp_path / "a")]
  assert "all 8 steps are done" in capsys.readouterr().out
  assert (tmp_path / "a/metrics.jsonl").read_bytes() == before

  def interrupted(*_):
    raise KeyboardInterrupt

  fake.after_training = interrupted
  assert run.run(config, tmp_path / "a") == errors.EXIT_RESUMABLE


@pytest.mark.slow
def test_what_may_change_on_resuming(tmp_path, config):
  config.training.keep_checkpoints = 9
  run.run(config, tmp_path / "a")
  whole = training_cases.curve(tmp_path / "a")
  for name in ("6", "8"):
    shutil.rmtree(tmp_path / "a/checkpoints" / name)
  config.mesh = config_lib.MeshConfig(replica=2, fsdp=2)
  config.training.checkpoint_every = 4
  config.training.keep_checkpoints = 1
  config.training.log_every = 2
  config.training.evaluate_every = 0
  config.data.prefetch = 3
  assert run.run(config, tmp_path / "a") == 0
  records = training_cases.curve(tmp_path / "a")
  assert [r["step"] for r in records] == [1, 2, 3, 4, 6, 8]
  assert records[:3] == whole[:3]
  np.testing.assert_allclose(records[-1]["loss"], whole[-1]["loss"], rtol=1e-5)


@pytest.mark.parametrize(
  "optimizer", rotation.cases(["adamw", "muon"], ["muon"])
)
def test_from_eight_devices_to_four_to_one(tmp_path, config, optimizer):
  config.optimizer.name = optimizer
  config.training.steps = 9
  config.training.batch_size = 16
  config.training.keep_checkpoints = 9
  config.data.packing = "stream"
  config.training.carry_state = True
  config.training.accumulation = 2
  run.run(config, tmp_path / "one")
  meshes = {
    3: config_lib.MeshConfig(replica=2, fsdp=4),
    6: config_lib.MeshConfig(fsdp=2, tensor=2),
    9: config_lib.MeshConfig(),
  }
  for stop, mesh in meshes.items():
    config.mesh = mesh
    assert run.run(config, tmp_path / "many") == 0
    for later in range(stop + 3, 10, 3):
      # As if it had been stopped there.
      shutil.rmtree(tmp_path / "many/checkpoints" / str(later))
  one, many = (training_cases.curve(tmp_path / x) for x in ("one", "many"))
  assert [r["tokens"] for r in many] == [r["tokens"] for r in one]
  ours, expected = ([r["loss"] for r in x] for x in (many, one))
  np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_a_folder_that_is_not_a_runs(tmp_path, config, name):
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / name).write_text("mine")
  with pytest.raises(errors.UserError, match="choose another --workdir"):
    run.run(config, tmp_path / "a")
  assert [p.name for p in (tmp_path / "a").iterdir()] == [name]
  with pytest.raises(errors.UserError, match="is a file"):
    run.run(config, tmp_path / "a" / name)


def test_bad_data_leaves_no_folder(tmp_path, config):
  config.data.source = str(tmp_path / "nothing")
  with pytest.raises(errors.UserError, match="nothing"):
    run.run(config, tmp_path / "a")
  assert not (tmp_path / "a").exists()


def test_data_that_changed_since(tmp_path, config, text):
  config.training.keep_checkpoints = 9
  run.run(config, tmp_path / "a")
  shutil.rmtree(tmp_path / "a/checkpoints/8")
  (tmp_path / "text/0.txt").write_text("other words")
  before = (tmp_path / "a/metrics.jsonl").read_bytes()
  with pytest.raises(errors.UserError, match="data"):
    run.run(config, tmp_path / "a")
  assert (tmp_path / "a/metrics.jsonl").read_bytes() == before


def test_diverging_stops_and_keeps_the_good_checkpoint(
  tmp_path, config, monkeypatch, capsys
):
  plain = step.make_train_step

  def poisoned(*arguments):
    train_step = plain(*arguments)

    def wrapped(state, batch):
      bad = jax.numpy.where(state.step >= 4, jax.numpy.nan, 1.0)
      params = jax.tree.map(lambda x: x * bad, state.params)
      return train_step(state._replace(params=params), batch)

    return wrapped

  monkeypatch.setattr(step, "make_train_step", poisoned)
  config.training.steps = 40
  config.training.max_nonfinite_steps = 5
  config.training.log_every = 4
  config.training.checkpoint_every = 4
  code = run.run(config, tmp_path / "a")
  assert code == errors.EXIT_DIVERGED
  assert runs.latest_step(tmp_path / "a") == 4
  (line,) = capsys.readouterr().err.splitlines()
  # Two steps were under way; they end before the process does.
  assert "not finite in 7 steps in a row, up to step 11" in line
  assert "checkpoint of step 4 stays" in line and "learning_rate" in line
  assert _steps(tmp_path / "a")[-1] <= 12


def test_a_learning_rate_too_high_diverges(tmp_path, config):
  config.optimizer.learning_rate = 1e30
  config.optimizer.clip_norm = 0.0
  config.training.steps = 30
  assert run.run(config, tmp_path / "a") == errors.EXIT_DIVERGED


def test_a_damaged_checkpoint_costs_steps_not_the_run(tmp_path, config, capsys):
  run.run(config, tmp_path / "a")
  whole = training_cases.curve(tmp_path / "a")
  (file,) = (tmp_path / "a/checkpoints/8/data").glob("metadata")
  file.write_text(file.read_text()[:-4])
  assert run.run(config, tmp_path / "a") == 0
  out = capsys.readouterr().out
  assert "8 is damaged" in out and "going on from step 6" in out
  assert training_cases.curve(tmp_path / "a") == whole


@pytest.mark.slow
def test_data_that_fails_in_mid_run_costs_steps_not_the_run(
  tmp_path, config, monkeypatch
):
  run.run(config, tmp_path / "whole")
  read, calls = store_lib.ArrayStore.read, []

  def failing(self, *arguments):
    calls.append(arguments)
    if len(calls) > 20:
      raise errors.UserError("shard 7: cannot be read")
    return read(self, *arguments)

  with monkeypatch.context() as patch:
    patch.setattr(store_lib.ArrayStore, "read", failing)
    with pytest.raises(errors.UserError, match="shard 7"):
      run.run(config, tmp_path / "a")
  assert runs.latest_step(tmp_path / "a")
  assert run.run(config, tmp_path / "a") == 0
  whole, ours = (training_cases.curve(tmp_path / x) for x in ("whole", "a"))
  assert ours == whole


# Writes that fail leave tensorstore's callbacks without their event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_costs_steps_not_the_run(small_disk, tmp_path, config):
  config.training.keep_checkpoints = 99
  config.training.checkpoint_every = 1
  config.training.steps = 20
  run.run(config, tmp_path / "whole")
  with pytest.raises(errors.UserError, match="free some space"):
    run.run(config, small_disk / "a")
  reached = runs.latest_step(small_disk / "a")
  assert 1 <= reached < 20
  subprocess.run(
    ["mount", "-o", "remount,size=9m", str(small_disk)], check=True
  )
  assert run.run(config, small_disk / "a") == 0
  whole, ours = (tmp_path / "whole", small_disk / "a")
  assert training_cases.curve(ours) == training_cases.curve(whole)


def test_a_full_disk_while_logging(tmp_path, config, monkeypatch):
  def full(self, record):
    with contextlib.ExitStack() as stack:
      stack.enter_context(metrics.disk.clear_errors("cannot write it"))
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(metrics.Log, "write", full)
  with pytest.raises(errors.UserError, match="free some space"):
    run.run(config, tmp_path / "a")


def test_no_permission_for_the_folder(tmp_path, config, monkeypatch):
  def refuse(*_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

  monkeypatch.setattr(integrity, "replace_text", refuse)
  with pytest.raises(errors.UserError, match="Permission denied; change"):
    run.run(config, tmp_path / "a")
