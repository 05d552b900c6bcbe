"""Whether a config may go on in a run's folder."""

import json

import pytest
import training_cases

from memcomp import config as config_lib
from memcomp import errors
from memcomp.layers import tensor_cache
from memcomp.runs import workdir


@pytest.fixture
def config():
  return training_cases.tiny()


def test_a_run_from_before_a_field_existed_goes_on(config):
  saved = json.loads(config_lib.to_json(config))
  del saved["model"]["norm_eps"], saved["evaluation"]
  workdir.check_same(saved, config, "here")
  config.model.norm_eps *= 2
  with pytest.raises(errors.UserError, match=r"model\.norm_eps was"):
    workdir.check_same(saved, config, "here")


def test_what_may_change_on_resuming(config):
  saved = json.loads(config_lib.to_json(config))
  for name in ("log_every", "evaluate_every", "checkpoint_every"):
    setattr(config.training, name, 3 + getattr(config.training, name))
  config.training.keep_checkpoints += 1
  config.data.prefetch += 1
  config.mesh.fsdp = 4
  workdir.check_same(saved, config, "here")
  config.training.batch_size *= 2
  with pytest.raises(errors.UserError, match=r"training\.batch_size was"):
    workdir.check_same(saved, config, "here")


def test_fields_that_a_version_has_not_are_named(config):
  saved = json.loads(config_lib.to_json(config))
  saved["model"]["depth"] = 3
  with pytest.raises(errors.UserError, match=r"model\.depth was 3, is"):
    workdir.check_same(saved, config, "here")
  with pytest.raises(errors.UserError, match="its config has depth"):
    workdir.config_of(saved, "here")


def test_the_folder_of_another_thing_is_one_short_line(config, tmp_path):
  """An exported model, or a run of which nearly every field differs."""
  path = tmp_path / "config.json"
  path.write_text(json.dumps({"format": "memcomp", "config": {}}))
  with pytest.raises(errors.UserError, match="holds an exported model"):
    workdir.check(tmp_path, config)
  path.write_text('{"model_type": "llama", "hidden_size": 2048}')
  with pytest.raises(errors.UserError, match="is no run's; choose another"):
    workdir.check(tmp_path, config)
  saved = config_lib.to_dict(config)
  saved["model"] = {f"field{i}": i for i in range(100)}
  path.write_text(json.dumps(saved))
  log = tmp_path / "metrics.jsonl"
  log.write_text('{"step": 1}\n')
  with pytest.raises(errors.UserError, match=r"and \d+ more") as caught:
    workdir.check(tmp_path, config)
  assert len(str(caught.value)) < 1000
  # Its process ended in the first step, such as for want of memory.
  log.write_text("")
  (tmp_path / "checkpoints").mkdir()
  workdir.check(tmp_path, config)


def test_an_empty_folder_of_checkpoints_is_nobodys(config, tmp_path):
  (tmp_path / "checkpoints").mkdir()
  workdir.check(tmp_path, config)
  (tmp_path / "checkpoints/3").mkdir()
  with pytest.raises(errors.UserError, match="holds checkpoints but no config"):
    workdir.check(tmp_path, config)


@pytest.mark.parametrize("place", ["a/checkpoints", "a/checkpoints/9/b"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_run_among_the_checkpoints_of_another(
  place, linked, config, tmp_path
):
  """It would be read for that run, or moved away as a damaged checkpoint."""
  (tmp_path / "a").mkdir()
  if linked:
    (tmp_path / "big").mkdir()
    (tmp_path / "a/checkpoints").symlink_to(tmp_path / "big")
  found = tmp_path / "a/config.json"
  for content in (None, "{", '{"of": "another program"}'):
    if content is not None:
      found.write_text(content)
    workdir.check(tmp_path / place, config)
  found.write_text(config_lib.to_json(config))
  with pytest.raises(
    errors.UserError, match="among the checkpoints of the run"
  ):
    workdir.check(tmp_path / place, config)


def test_a_mixer_without_a_later_field_is_as_it_was(config):
  """Tensor Cache's memory had an output projection, which one now asks for."""
  config.model.mixers["memory"] = tensor_cache.TensorCacheConfig()
  saved = config_lib.to_dict(config)
  assert saved["model"]["mixers"]["memory"].pop("memory_output") is False
  found = workdir.config_of(saved, "here")
  assert found.model.mixers["memory"].memory_output
