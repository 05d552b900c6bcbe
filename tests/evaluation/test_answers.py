"""Rows of tasks answered and scored; slices found again; equal seeds."""

import dataclasses
import json
import pathlib
import random

import evaluation_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp import errors, limits
from memcomp.data import tokenizer
from memcomp.data.synthetic import mqar_task, recall
from memcomp.evaluation import answers, load, run
from memcomp.evaluation import mqar as mqar_evaluation
from memcomp.evaluation import recall as recall_evaluation

TASKS = {
  "recall": recall.RecallConfig(gap=3, episodes=2, symbols=4),
  "mqar": mqar_task.MqarConfig(
    vocab_size=64, train="16:2:8", test="16:2:12;24:4:10"
  ),
}
FLAGS = {
  "recall": {"gaps": ["3", "5"], "samples": 12},
  "mqar": {},
}


class Parrot(nnx.Module):
  """Answers with the token it reads, at odds of e^2 to any other."""

  def __init__(self, ids: int):
    self.scale = nnx.Param(jnp.float32(2))
    self.ids = ids

  def hidden(self, tokens):
    return jax.nn.one_hot(tokens, self.ids), None

  def logits(self, hidden):
    return hidden * self.scale[...]


def test_what_is_asked_is_scored():
  tokens = np.array([[1, 2, 3, 0], [4, 4, 0, 1], [2, 0, 1, 3]], np.int32)
  targets = np.array([[1, -1, 0, -1], [-1, 4, -1, 1], [3, 3, -1, -1]], np.int32)
  found = answers.measure(Parrot(5), tokens, targets)
  right = [[True, False], [True, True], [False, False]]
  assert found.right.tolist() == right
  best, other = np.exp(2) / (np.exp(2) + 4), 1 / (np.exp(2) + 4)
  np.testing.assert_allclose(found.confidence, best, rtol=1e-6)
  nats = -np.log(np.where(right, best, other))
  np.testing.assert_allclose(found.nats, nats, rtol=1e-6)
  figures = answers.summary(found)
  # By row 1/2, 1 and 0.
  assert figures["accuracy"] == 0.5
  np.testing.assert_allclose(figures["accuracy_error"], 0.5 / 3**0.5)
  np.testing.assert_allclose(figures["nats"], nats.mean(), rtol=1e-6)
  np.testing.assert_allclose(
    figures["calibration_error"], abs(0.5 - best), rtol=1e-5
  )


def test_one_row_has_no_error():
  found = answers.measure(Parrot(5), np.array([[1, 2]]), np.array([[1, -1]]))
  assert answers.summary(found)["accuracy_error"] is None


@pytest.mark.parametrize(
  ("workdir", "options"),
  [("recall", {"gaps": ["3"], "samples": 1}), ("mqar", {"segments": "16:2:1"})],
  indirect=["workdir"],
)
def test_the_line_of_one_row_has_no_error(workdir, options, tmp_path, capsys):
  task = load.open_checkpoint(workdir).config.name
  run.run(workdir, task, out=str(tmp_path), options=options)
  lines = capsys.readouterr().out.splitlines()
  assert task == "mqar" or lines[1].endswith(", 1 row each")
  title, line = lines[2:4]
  assert "+-" not in line
  assert line[title.index("(error)") + 6] == "-"
  assert _read(tmp_path)["slices"][0]["accuracy_error"] is None


def test_a_model_that_is_not_finite_is_named():
  model = Parrot(5)
  model.scale[...] = jnp.nan
  with pytest.raises(errors.UserError, match="not finite: its training"):
    answers.measure(model, np.array([[1, 2]]), np.array([[1, -1]]))


def test_rows_that_do_not_fill_a_call_count_once(monkeypatch):
  monkeypatch.setattr(answers, "_CALL_TOKENS", 9)
  rng = np.random.default_rng(0)
  tokens = rng.integers(5, size=(7, 4)).astype(np.int32)
  targets = np.full((7, 4), -1, np.int32)
  targets[:, 1] = np.where(rng.random(7) < 0.5, tokens[:, 1], 4)
  done = []
  found = answers.measure(Parrot(5), tokens, targets, done.append)
  assert found.right.shape == (7, 1) and done == [2, 2, 2, 1]
  assert found.right[:, 0].tolist() == (tokens[:, 1] == targets[:, 1]).tolist()


def test_calibration_error_is_over_bins():
  """Against a loop; 1 is in the last bin, and bins count by their answers."""
  rng = np.random.default_rng(1)
  confidence = np.append(rng.random(199), 1.0).reshape(20, 10)
  right = rng.random((20, 10)) < 0.3 + 0.4 * confidence
  found = answers.calibration_error(
    answers.Answers(right, np.zeros((20, 10)), confidence)
  )
  want = 0.0
  for low in np.arange(15) / 15:
    inside = (confidence >= low) & (confidence < low + 1 / 15)
    inside |= (confidence == 1) & (low > 0.9)
    if inside.any():
      gap = right[inside].mean() - confidence[inside].mean()
      want += inside.mean() * abs(gap)
  np.testing.assert_allclose(found, want, rtol=1e-9)
  # Right as often as it is sure: none.
  sure = answers.Answers(
    np.ones((4, 1), bool), np.zeros((4, 1)), np.ones((4, 1))
  )
  assert answers.calibration_error(sure) == 0


@pytest.fixture(scope="module", params=rotation.cases(TASKS, ["recall"]))
def workdir(request, tmp_path_factory) -> pathlib.Path:
  """A checkpoint of step 3 with random weights, trained on a task."""
  config = cases.tiny_config(task=TASKS[request.param], tokenizer="none")
  config.name = request.param
  folder = tmp_path_factory.mktemp(request.param) / "run"
  cases.save(folder, config, 3, tokenizer=tokenizer.NoTokenizer().fingerprint)
  return folder


def _read(folder):
  (path,) = folder.glob("*-step3.json")
  return json.loads(path.read_text())


@pytest.mark.slow
def test_slices_are_measured_once_and_equal_for_equal_seeds(
  workdir, tmp_path, capsys, monkeypatch
):
  name = load.open_checkpoint(workdir).config.name
  random.seed(2)
  np.random.seed(2)
  before = random.getstate(), np.random.get_state()[1].copy()
  for folder in ("a", "b"):
    run.run(workdir, name, out=str(tmp_path / folder), options=FLAGS[name])
  assert random.getstate() == before[0]
  assert (np.random.get_state()[1] == before[1]).all()
  first, second = (_read(tmp_path / folder) for folder in ("a", "b"))
  assert first == second and len(first["slices"]) == 2
  assert "jax" in first["versions"] and len(first["weights"]) == 16
  for one in first["slices"]:
    assert 0 <= one["accuracy"] < 0.6 and one["nats"] > 0
    assert len(one["task_hash"]) == len(one["rows_hash"]) == 16
    assert one["state_bytes"] > 0
  table = (tmp_path / "a/results.md").read_text()
  assert table.count("accuracy") == 2 and "step 3" in table
  pytest.importorskip("matplotlib")
  (picture,) = (tmp_path / "a").glob("*.png")
  assert picture.stat().st_size > 5000

  module = {"recall": recall_evaluation, "mqar": mqar_evaluation}[name]

  def never(*unused):
    raise AssertionError("measured again")

  capsys.readouterr()
  kept = module.measure
  monkeypatch.setattr(module, "measure", never)
  # The table of an evaluation that was stopped before it was written.
  (tmp_path / "a/results.md").unlink()
  run.run(workdir, name, out=str(tmp_path / "a"), options=FLAGS[name])
  assert capsys.readouterr().out.count("done before") == 2
  assert (tmp_path / "a/results.md").read_text() == table
  # Another seed is another slice, with other rows.
  monkeypatch.setattr(module, "measure", kept)
  run.run(workdir, name, out=str(tmp_path / "a"), seed=9, options=FLAGS[name])
  again = _read(tmp_path / "a")["slices"]
  assert again[:2] == first["slices"] and len(again) == 4
  assert again[2]["rows_hash"] != again[0]["rows_hash"]


def test_the_end_of_training_asks_the_task(
  workdir, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(recall_evaluation, "GAPS", (5,))
  opened = load.open_checkpoint(workdir)
  run.after_training(opened.config, tmp_path, workdir)
  name = opened.config.name
  found = json.loads((tmp_path / "eval/results.json").read_text())
  assert (found["task"], found["step"]) == (name, 3)
  slices = _read(tmp_path / "eval")["slices"]
  assert len(slices) == 2
  assert "written" in capsys.readouterr().out


def test_what_is_not_finite_at_the_end_of_training_ends_no_sweep(
  workdir, tmp_path, capsys, monkeypatch
):
  def measure(*unused):
    raise limits.NotFiniteError("not finite")

  monkeypatch.setattr(answers, "measure", measure)
  opened = load.open_checkpoint(workdir)
  run.after_training(opened.config, tmp_path, workdir)
  found = json.loads((tmp_path / "eval/results.json").read_text())
  assert (found["task"], found["step"]) == (opened.config.name, 3)
  assert "not evaluated further: not finite" in capsys.readouterr().out


def test_other_tasks_say_what_it_was_trained_on(workdir):
  name = load.open_checkpoint(workdir).config.name
  other = "mqar" if name == "recall" else "recall"
  for task, message in (
    (other, f"trained on rows of task {name}.*configs/{other}.py"),
    ("perplexity", f"rows of task {name}, not on text.*--task={name}"),
    ("sample", "stand for no text"),
    ("chat", "stand for no text"),
  ):
    with pytest.raises(errors.UserError, match=message) as caught:
      run.run(workdir, task)
    assert "\n" not in str(caught.value)


def test_text_models_are_no_task_s(run_folder):
  with pytest.raises(errors.UserError, match=r"was trained on text"):
    run.run(run_folder, "recall")


def test_mqar_is_called_so_only_where_it_is_exact():
  task = TASKS["mqar"]
  segment = task.segments("test")[1]
  about = mqar_evaluation.describe(task, segment, 5, 0)
  assert (about["task"], about["length"], about["pairs"]) == ("mqar", 24, 4)
  fast = dataclasses.replace(task, mode="fast")
  other = mqar_evaluation.describe(fast, segment, 5, 0)
  assert other["task"] == "mqar-fast"
  assert other["task_hash"] != about["task_hash"]


@pytest.mark.parametrize("workdir", ["mqar"], indirect=True)
def test_a_segment_has_its_rows_wherever_it_stands(workdir, tmp_path):
  def rows(segments, out):
    options = {"segments": segments} if segments else {}
    run.run(workdir, "mqar", out=str(tmp_path / out), options=options)
    return {
      f"{one['length']}:{one['pairs']}:{one['examples']}": one["rows_hash"]
      for one in _read(tmp_path / out)["slices"]
    }

  own = rows("", "a")
  last = rows("24:4:10", "b")
  assert own == rows("", "b") and last == {"24:4:10": own["24:4:10"]}
  # A segment of which the task has no rows is one more slice and line.
  other = rows("24:4:6;16:2:12;24:4:6", "a")
  assert other == own | rows("24:4:6", "c") and len(other) == 3
  table = (tmp_path / "a/results.md").read_text()
  assert table.count("tokens") == 3 and table.count("segment seed") == 1


@pytest.mark.parametrize("workdir", ["mqar"], indirect=True)
def test_equal_segments_of_a_task_have_a_line_each(
  workdir, tmp_path, monkeypatch
):
  opened = load.open_checkpoint(workdir)
  opened.config.data.task = dataclasses.replace(
    TASKS["mqar"], test="16:2:4;16:2:4"
  )
  monkeypatch.setattr(load, "open_checkpoint", lambda *_: opened)
  run.run(workdir, "mqar", out=str(tmp_path))
  slices = _read(tmp_path)["slices"]
  assert len({one["rows_hash"] for one in slices}) == 2
  *_, first, second = (tmp_path / "results.md").read_text().splitlines()
  assert "rows, vocabulary 64, seed 0 |" in first
  assert f"seed 0, segment seed {slices[1]['segment_seed']} |" in second


@pytest.mark.parametrize(
  ("workdir", "options", "message"),
  [
    ("recall", {"gaps": ["x"]}, "--gaps=x: give whole numbers"),
    ("recall", {"samples": 0}, "--samples=0"),
    ("recall", {"segments": "16:2:4"}, "--segments means nothing"),
    ("mqar", {"segments": "16:9:4"}, "^--segments=16:9:4: length=16"),
    ("mqar", {"segments": "32:4"}, "^--segments='32:4' is not LENGTH:PAIRS"),
    ("mqar", {"gaps": ["3"]}, "--gaps means nothing"),
  ],
  indirect=["workdir"],
)
def test_bad_flags(workdir, options, message):
  task = load.open_checkpoint(workdir).config.name
  with pytest.raises(errors.UserError, match=message):
    run.run(workdir, task, options=options)
