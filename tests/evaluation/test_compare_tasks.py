"""Runs of a task side by side, from the files that they left."""

import json
import shutil

import evaluation_cases as cases
import pytest

from memcomp import config as config_lib
from memcomp import errors
from memcomp.data.synthetic import recall
from memcomp.training import compare


def leave(folder, name, seed, accuracy, **task):
  """Writes what an evaluated run leaves: accuracy by gap."""
  place = folder / f"{name}-{seed}" / "eval"
  place.mkdir(parents=True)
  result = {
    "name": name,
    "seed": seed,
    "step": 9,
    "state_bytes": 1024,
    "task": "recall",
    "config": {"data": {"task": {"name": "recall", "gap": 24} | task}},
  }
  (place / "results.json").write_text(json.dumps(result))
  write_slices(place, [answered(g, a) for g, a in accuracy.items()])
  # Slices of another step are another's.
  (place / "recall-step3.json").write_text('{"slices": [0]}')


def answered(gap, accuracy, samples=256, rows="aa"):
  """Returns a slice of a result; `rows` is the hash of its questions."""
  about = {"gap": gap, "samples": samples, "rows_hash": rows}
  return about | {"accuracy": accuracy}


def write_slices(place, slices):
  (place / "recall-step9.json").write_text(json.dumps({"slices": slices}))


def test_means_over_seeds_by_slice(tmp_path, capsys):
  leave(tmp_path, "full", 0, {24: 1.0, 48: 0.5})
  leave(tmp_path, "full", 1, {24: 0.5, 48: 0.5})
  leave(tmp_path, "window", 0, {24: 0.0625}, gap=48)
  text = tmp_path / "quickstart/eval/results.json"
  text.parent.mkdir(parents=True)
  text.write_text('{"name": "quickstart", "perplexity": {}}')
  compare.run(tmp_path)
  out = capsys.readouterr().out
  assert "left out, since they were trained on text: quickstart\n" in out
  assert "| full | 2 | 1,024 | 0.750 ± 0.354 | 0.500 |" in out
  assert "| window | 1 | 1,024 | 0.062 |  |" in out
  found = json.loads((tmp_path / "compare.json").read_text())
  assert found["slices"] == ["24", "48"]
  assert found["rows"][0]["seeds"] == [0, 1]
  assert (tmp_path / "compare.md").read_text() in out
  pytest.importorskip("matplotlib")
  assert (tmp_path / "compare.png").stat().st_size > 5000


def test_needles_are_in_percent(tmp_path, capsys):
  place = tmp_path / "needles-0" / "eval"
  place.mkdir(parents=True)
  result = {
    "name": "needles",
    "seed": 0,
    "step": 9,
    "state_bytes": 1024,
    "task": "niah",
    "config": {"data": {"task": {"name": "niah", "context": 1024}}},
  }
  (place / "results.json").write_text(json.dumps(result))
  one = {
    "needle": "single_1",
    "context": 1024,
    "samples": 100,
    "questions_hash": "aa",
    "loose": 28.0,
    "strict": 21.0,
  }
  (place / "niah-step9.json").write_text(json.dumps({"slices": [one]}))
  compare.run(tmp_path)
  assert "| needles | 1 | 1,024 | 0.280 |" in capsys.readouterr().out
  found = json.loads((tmp_path / "compare.json").read_text())
  assert found["slices"] == ["single_1/1024"]


DIFFER = "the runs have answered different questions in 24; evaluate them"
SEVERAL = (
  "some runs have answered several sets of questions in 24: what counts is"
)


@pytest.mark.parametrize(
  ("full", "window", "cells", "notes"),
  [
    # A trial of few samples, also of the other seed, is not counted.
    ([(1.0, 2, "b"), (0.5, 500, "a")], [(0.25, 500, "a")], "0.5 0.25", SEVERAL),
    # All have answered a, and a and b.
    ([(1.0, 9, "b"), (0.5, 3, "a")], [(0.25, 3, "a")], "0.5 0.25", SEVERAL),
    (
      [(1.0, 3, "a"), (0.5, 9, "b")],
      [(0.25, 9, "b"), (0.75, 3, "a")],
      "0.5 0.25",
      SEVERAL,
    ),
    # All have answered both: the first run's first.
    (
      [(0.5, 9, "a"), (1.0, 9, "b")],
      [(1.0, 9, "b"), (0.25, 9, "a")],
      "0.5 0.25",
      SEVERAL,
    ),
    ([(0.5, 9, "a")], [(0.25, 9, "b")], "0.5 0.25", DIFFER),
    (
      [(0.75, 3, "a"), (0.5, 9, "b")],
      [(0.25, 9, "c")],
      "0.5 0.25",
      f"{DIFFER} again with the same flags and --seed (questions of niah also"
      f" follow the tokenizer)\n{SEVERAL}",
    ),
  ],
)
def test_a_column_is_of_one_set_of_questions(
  full, window, cells, notes, tmp_path, capsys
):
  for name, sets in (("full", full), ("window", window)):
    leave(tmp_path, name, 0, {})
    slices = [answered(24, *one) for one in sets] + [answered(48, 0.125)]
    write_slices(tmp_path / f"{name}-0/eval", slices)
  compare.run(tmp_path)
  out = capsys.readouterr().out
  assert notes in out
  assert (DIFFER in out, SEVERAL in out) == (DIFFER in notes, SEVERAL in notes)
  found = json.loads((tmp_path / "compare.json").read_text())
  accuracies = [row["accuracy"] for row in found["rows"]]
  assert accuracies == [[float(x), 0.125] for x in cells.split()]


def test_a_slice_of_some_runs_is_of_one_set_of_questions(tmp_path, capsys):
  leave(tmp_path, "full", 0, {24: 1.0, 48: 0.5})
  leave(tmp_path, "window", 0, {24: 0.25})
  compare.run(tmp_path)
  assert "questions" not in capsys.readouterr().out


def test_a_copy_is_no_further_seed(tmp_path):
  leave(tmp_path, "full", 0, {24: 1.0})
  leave(tmp_path, "full", 1, {24: 1.0})
  shutil.copytree(tmp_path / "full-0", tmp_path / "full-0-backup")
  with pytest.raises(errors.UserError, match="full-0-backup both hold full of"):
    compare.run(tmp_path)


def test_other_tasks_are_refused(tmp_path):
  leave(tmp_path, "full", 0, {24: 1.0}, episodes=6)
  leave(tmp_path, "window", 0, {24: 1.0}, episodes=1)
  with pytest.raises(errors.UserError, match=r"window and full.*other tasks"):
    compare.run(tmp_path)
  assert not (tmp_path / "compare.json").exists()


def leave_whole(folder, name, seed, **fields):
  """As `leave`, with a whole config, in which fields differ (model__d_model)."""
  leave(folder, name, seed, {24: 1.0 - seed / 2})
  config = cases.tiny_config(task=recall.RecallConfig(gap=24))
  for path, value in fields.items():
    part, field = path.split("__")
    setattr(getattr(config, part), field, value)
  path = folder / f"{name}-{seed}/eval/results.json"
  found = json.loads(path.read_text()) | {"config": config_lib.to_dict(config)}
  path.write_text(json.dumps(found))


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("model__d_model", 64),
    ("training__steps", 10),
    ("optimizer__learning_rate", 0.5),
  ],
)
def test_other_models_are_no_seeds_of_one(field, value, tmp_path):
  leave_whole(tmp_path, "full", 0)
  leave_whole(tmp_path, "full", 1, **{field: value})
  said = (
    rf"full of seeds 0 and 1 differ: {field.replace('__', '.')} is .* and"
    rf" {value}; .*another --config\.name"
  )
  with pytest.raises(errors.UserError, match=said):
    compare.run(tmp_path)
  assert not (tmp_path / "compare.json").exists()


def test_models_of_other_names_differ(tmp_path):
  """So may seeds in what changes no result."""
  leave_whole(tmp_path, "full", 0)
  leave_whole(tmp_path, "full", 1, training__log_every=3, model__remat="full")
  leave_whole(tmp_path, "wide", 0, model__d_model=64, training__steps=10)
  compare.run(tmp_path)
  found = json.loads((tmp_path / "compare.json").read_text())
  assert [row["seeds"] for row in found["rows"]] == [[0, 1], [0]]


def test_runs_of_two_versions_are_compared(tmp_path):
  """One from before `pairs` was a field, which is 1 by default."""
  leave(tmp_path, "old", 0, {24: 1.0})
  leave(tmp_path, "new", 0, {24: 1.0}, pairs=1)
  compare.run(tmp_path)


@pytest.mark.parametrize(
  "change",
  [
    {"name": ["x"]},
    {"seed": "one"},
    {"state_bytes": None},
    {"config": {}},
    {"task": "another"},
  ],
  ids=str,
)
def test_a_damaged_result_is_named(change, tmp_path):
  leave(tmp_path, "full", 0, {24: 1.0})
  path = tmp_path / "full-0/eval/results.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(errors.UserError, match="damaged, or of another version"):
    compare.run(tmp_path)


def test_runs_without_slices(tmp_path):
  leave(tmp_path, "full", 0, {24: 1.0})
  (tmp_path / "full-0/eval/recall-step9.json").unlink()
  with pytest.raises(errors.UserError, match="no slices in their eval folders"):
    compare.run(tmp_path)
