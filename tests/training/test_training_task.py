"""The trainer on rows of a task: the same loop, its own loss and accuracy."""

import json
import shutil

import numpy as np
import pytest
import rotation
import training_cases

from memcomp import config as config_lib
from memcomp import errors, sharding
from memcomp.data.synthetic import mqar_task, recall
from memcomp.runs import workdir
from memcomp.training import metrics, run, validate

pytestmark = pytest.mark.usefixtures("leaky_model")

TASKS = {
  "recall": recall.RecallConfig(gap=3, episodes=2, symbols=4),
  "mqar": mqar_task.MqarConfig(
    vocab_size=64, train="16:2:10;24:4:8", test="16:2:4;32:4:4", mode="fast"
  ),
}


@pytest.fixture(params=rotation.cases(TASKS, ["mqar"]))
def config(request):
  """Eight steps of four rows, validated on two batches."""
  config = training_cases.tiny(evaluate_every=4, evaluate_batches=2)
  config.data.task = TASKS[request.param]
  config.data.tokenizer = "none"
  config.data.sequence_length = max(config.data.task.lengths("train"))
  return config


def test_resuming_equals_going_on(tmp_path, config, capsys):
  config.training.accumulation = 2
  config.training.keep_checkpoints = 9
  assert run.run(config, tmp_path / "a") == 0
  whole = training_cases.curve(tmp_path / "a")
  for name in ("6", "8"):
    shutil.rmtree(tmp_path / "a/checkpoints" / name)
  assert run.run(config, tmp_path / "a") == 0
  assert training_cases.curve(tmp_path / "a") == whole
  assert len(whole) == 8 and "going on from step 3" in capsys.readouterr().out
  assert all(0 <= r["accuracy"] <= 1 for r in whole)
  assert [r["step"] for r in whole if "validation_accuracy" in r] == [4, 8]
  # The last batch of the first segment is half padding.
  asked = {"recall": [8] * 8, "mqar": [8, 8, 4, 16, 16, 8, 8, 4]}
  assert [r["tokens"] for r in whole] == asked[config.data.task.name]


def test_the_config_comes_back(config):
  saved = json.loads(config_lib.to_json(config))
  assert saved["data"]["task"]["name"] == config.data.task.name
  assert workdir.config_of(saved, "here") == config
  saved["data"]["task"]["name"] = "riddles"
  with pytest.raises(errors.UserError, match=r"riddles.*mqar, recall"):
    workdir.config_of(saved, "here")


def test_the_line_says_accuracy(capsys):
  record = {
    "step": 3,
    "loss": 1.5,
    "bits_per_byte": 2.1,
    "accuracy": 0.25,
    "validation_bits_per_byte": 2.2,
    "validation_accuracy": 0.125,
    "skipped": 0,
  }
  metrics.StepProgress(9).show(record)
  line = capsys.readouterr().out
  assert "accuracy 0.250" in line and "validation 0.125" in line
  assert "bits" not in line


def test_impossible_settings(config):
  config.model.vocab_size = config.data.task.ids() - 1
  with pytest.raises(errors.UserError, match=r"model.vocab_size = .*or more"):
    validate.check(config)
  config.model.vocab_size += 1
  validate.check(config)
  config.training.carry_state = True
  with pytest.raises(errors.UserError, match=r"carry_state"):
    validate.check(config)


def test_rows_divide_over_the_mesh(config):
  config.mesh.context = 7
  mesh = sharding.make_mesh(config.mesh)
  with pytest.raises(errors.UserError, match=r"do not divide over mesh.con"):
    validate.check_mesh(config, mesh)
  assert np.prod(list(mesh.shape.values())) == 7
