"""Runs side by side: figures, what makes them not comparable, table, plot."""

import copy
import json
import shutil

import evaluation_cases as cases
import pytest

from memcomp import config as config_lib
from memcomp import errors
from memcomp.evaluation import run
from memcomp.training import compare, speed


def result(name, seed, bits, late, **changes):
  config = cases.tiny_config()
  config.name, config.seed = f"compare-{name}", seed
  config.training.steps, config.training.batch_size = 7, 2
  return {
    "name": config.name,
    "step": 7,
    "seed": seed,
    "parameters": 1000,
    "state_bytes": 256,
    "config": config_lib.to_dict(config),
    "perplexity": {
      "text": {"name": "some text", "bytes": 99},
      "task_hash": "same",
      "trained_length": {"bits_per_byte": bits},
      "streamed": {
        "positions": 128,
        "buckets": [{"bits_per_byte": 9.0}, {"bits_per_byte": late}],
      },
    },
  } | changes


def write(folder, *results):
  for found in results:
    run_folder = folder / f"{found['name']}-{found['seed']}" / "eval"
    run_folder.mkdir(parents=True)
    (run_folder / "results.json").write_text(json.dumps(found))


@pytest.fixture
def runs(tmp_path, monkeypatch):
  monkeypatch.setattr(
    speed, "training", lambda configs, **_: dict.fromkeys(configs, 1234.5)
  )
  write(
    tmp_path,
    result("worse", 0, 3.0, 3.5),
    result("better", 0, 2.0, 2.5),
    result("better", 1, 2.2, 2.3),
  )
  return tmp_path


def test_rows_by_hand(runs):
  found = compare.compare(runs)
  better, worse = found["rows"]
  assert better["name"] == "better" and better["seeds"] == [0, 1]
  assert better["bits_per_byte"] == pytest.approx(2.1)
  # Of the sample: the mean is estimated from the same runs.
  assert better["bits_per_byte_std"] == pytest.approx(0.02**0.5)
  assert better["late_bits_per_byte"] == pytest.approx(2.4)
  assert worse["bits_per_byte_std"] is None
  assert found["task"]["trained_tokens"] == 7 * 2 * 32
  assert found["notes"] == ["worse has 1 of 2 seeds"]
  table = compare.table(found).splitlines()
  assert table[2].startswith("| better | 2.100 ± 0.141 | 2.400 ± 0.141 | 256 |")
  assert "| 1,234 | 1,000 |" in table[3]


def test_the_program_writes_table_and_plot(runs, capsys):
  compare.run(runs)
  assert "| better |" in (runs / "compare.md").read_text()
  assert (runs / "compare.png").stat().st_size > 5000
  rows = json.loads((runs / "compare.json").read_text())["rows"]
  assert [row["name"] for row in rows] == ["better", "worse"]
  assert "worse has 1 of 2 seeds" in capsys.readouterr().out


def test_a_model_that_broke_comes_last(runs):
  write(runs, result("broken", 0, None, None))
  found = compare.compare(runs)
  assert [row["name"] for row in found["rows"]][-1] == "broken"
  assert "| broken | not finite | not finite |" in compare.table(found)
  assert run.plot.side_by_side(found, runs / "plot.png").exists()


def test_counts_that_differ_are_pointed_out(runs):
  write(runs, result("large", 0, 2.5, 2.5, parameters=1021))
  assert any("1,000 to 1,021" in n for n in compare.compare(runs)["notes"])


@pytest.mark.parametrize("field", ["steps", "text", "learning_rate"])
def test_other_tasks_are_refused(field, runs):
  other = copy.deepcopy(result("other", 0, 2.5, 2.5))
  if field == "text":
    other["perplexity"]["task_hash"] = "other"
  else:
    part = "training" if field == "steps" else "optimizer"
    other["config"][part][field] = 8
  write(runs, other)
  with pytest.raises(errors.UserError, match=f"not comparable: .*{field}"):
    compare.compare(runs)


def test_a_copy_is_no_further_seed(runs):
  shutil.copytree(runs / "compare-worse-0", runs / "copy")
  with pytest.raises(errors.UserError, match="both hold compare-worse of seed"):
    compare.compare(runs)


def test_other_models_are_no_seeds_of_one(runs):
  """Their mean and deviation would be of no model."""
  other = copy.deepcopy(result("better", 2, 2.5, 2.5))
  other["config"]["model"]["d_model"] = 48
  write(runs, other)
  said = (
    r"compare-better of seeds 0 and 2 differ: model\.d_model is 32 and 48;"
    r" .*another --config\.name"
  )
  with pytest.raises(errors.UserError, match=said):
    compare.compare(runs)


def test_seeds_may_differ_in_what_changes_no_result(runs):
  """Also in the names of mixers, and in fields that an older run lacks."""
  other = copy.deepcopy(result("better", 2, 2.5, 2.5))
  model = other["config"]["model"]
  model["remat"] = "full"
  model["mixers"]["another"] = model["mixers"].pop("memory")
  del model["norm"]
  write(runs, other)
  assert compare.compare(runs)["rows"][0]["seeds"] == [0, 1, 2]


def test_runs_of_two_versions_are_compared(runs):
  """The older one has not a field that the newer one has at its default."""
  older = result("older", 0, 2.5, 2.5)
  del older["config"]["training"]["implementation"]
  write(runs, older)
  assert len(compare.compare(runs)["rows"]) == 3


def test_runs_may_differ_in_what_changes_no_result(runs):
  other = result("other", 0, 2.5, 2.5)
  other["config"]["training"]["watchdog_seconds"] = 5
  other["config"]["data"]["prefetch"] = 7
  write(runs, other)
  assert len(compare.compare(runs)["rows"]) == 3


@pytest.mark.parametrize("field", ["seed", "parameters", "name", "perplexity"])
def test_a_damaged_result_is_named(field, runs):
  write(runs, result("other", 0, 2.5, 2.5) | {field: {}})
  with pytest.raises(errors.UserError, match="damaged, or of another version"):
    compare.compare(runs)


def test_a_result_without_its_positions_is_named(runs):
  damaged = copy.deepcopy(result("other", 0, 2.5, 2.5))
  damaged["perplexity"]["streamed"]["positions"] = None
  write(runs, damaged)
  with pytest.raises(errors.UserError, match="damaged, or of another version"):
    compare.compare(runs)


def test_an_empty_folder_is_named(tmp_path):
  with pytest.raises(errors.UserError, match="holds no finished runs"):
    compare.run(tmp_path / "nothing")
  assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_speed_counts_tokens():
  config = cases.tiny_config()
  config.training.batch_size = 2
  config.mesh.replica = 16  # of a machine with more devices
  turns = []
  found = speed.training(
    {"a": config}, rounds=2, steps=1, progress=lambda: turns.append(1)
  )
  assert found["a"] > 0 and len(turns) == 3


def test_all_are_timed_on_one_device_where_one_run_had_more():
  here, elsewhere = cases.tiny_config(), cases.tiny_config()
  here.mesh.replica, elsewhere.mesh.replica = 2, 16
  assert speed._meshes({"a": here})["a"].size == 2
  found = speed._meshes({"a": here, "b": elsewhere})
  assert [mesh.size for mesh in found.values()] == [1, 1]
