"""Checkpoints in a bucket, the run's other files here."""

import buckets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import training_cases

from memcomp import config as config_lib
from memcomp import errors, sharding
from memcomp.runs import load
from memcomp.training import checkpoint, run, state

PLACE = "gs://bucket/run"


@pytest.fixture
def saved(tmp_path, monkeypatch):
  """Makes (config, mesh, state) with steps 1, 2, 3 saved and 2, 3 kept."""
  buckets.make(tmp_path / "service", monkeypatch)
  config = training_cases.tiny()
  mesh = sharding.make_mesh(config.mesh)
  start = state.initial_state(config, mesh)
  manager = checkpoint.Checkpoints(PLACE, keep=2)
  for step in (1, 2, 3):
    numbered = start._replace(step=jnp.int32(step))
    meta = {"config": config_lib.to_dict(config)}
    manager.save(step, numbered, {"place": step}, meta)
  manager.close()
  return config, mesh, start


def restore(config, mesh):
  manager = checkpoint.Checkpoints(PLACE, keep=2)
  try:
    return manager.restore(state.abstract_state(config, mesh), lambda _: None)
  finally:
    manager.close()


def test_the_newest_is_read_back(saved, tmp_path):
  config, mesh, start = saved
  found = restore(config, mesh)
  assert (found.step, found.data, int(found.state.step)) == (3, {"place": 3}, 3)
  jax.tree.map(np.testing.assert_array_equal, found.state.params, start.params)
  folder = tmp_path / "service" / "bucket" / "run" / "checkpoints"
  assert sorted(p.name for p in folder.iterdir()) == ["2", "3"]
  (folder / "3" / "commit_success.txt").unlink()
  assert runs.latest_step(PLACE) == 2


@pytest.mark.slow
def test_one_without_its_commit_is_none(saved, tmp_path):
  config, mesh, _ = saved
  path = tmp_path / "service" / "bucket" / "run" / "checkpoints" / "3"
  (path / "commit_success.txt").unlink()
  assert runs.latest_step(PLACE) == 2
  assert restore(config, mesh).step == 2
  load.read(PLACE)
  with pytest.raises(errors.UserError, match=r"no checkpoint of step 3"):
    load.read(PLACE, 3)


@pytest.mark.slow
def test_a_run_is_known_from_an_empty_workdir(
  text, leaky_model, tmp_path, monkeypatch, capsys
):
  buckets.make(tmp_path / "service", monkeypatch)
  config = training_cases.tiny(text, steps=3)
  assert run.run(config, tmp_path / "first", PLACE) == 0
  assert not (tmp_path / "first" / "checkpoints").exists()
  capsys.readouterr()
  assert run.run(config, tmp_path / "second", PLACE) == 0
  assert f"{PLACE}: all 3 steps are done" in capsys.readouterr().out
  config.seed = 1
  with pytest.raises(errors.UserError, match=f"checkpoint in {PLACE}.*seed"):
    run.run(config, tmp_path / "third", PLACE)


def test_a_workdir_cannot_be_in_a_bucket(tmp_path):
  with pytest.raises(
    errors.UserError, match=r"--checkpoints=gs://b/run instead"
  ):
    run.run(training_cases.tiny(), "gs://b/run")


def test_the_library_is_asked_for(tmp_path, monkeypatch):
  monkeypatch.setattr("memcomp.paths._LIBRARIES", ("no_such_library",))
  with pytest.raises(errors.UserError, match=r"pip install 'memcomp\[gcs\]'"):
    checkpoint.Checkpoints(PLACE, keep=1)
