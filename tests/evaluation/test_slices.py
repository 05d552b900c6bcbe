import dataclasses
import json

import evaluation_cases as cases
import pytest

from memcomp import errors
from memcomp.evaluation import load, run, slices


def test_slices_are_found_again(run_folder, tmp_path):
  opened = load.open_checkpoint(run_folder)
  found = slices.Slices(tmp_path, "task", opened)
  assert found.find(seed=1) is None
  found.add({"seed": 1, "x": 2.5}, setting="1 | a", result="2.5", state_bytes=7)
  found.add({"seed": 2, "x": 3.5}, setting="2", result="3.5", state_bytes=7000)

  again = slices.Slices(tmp_path, "task", opened)
  assert again.find(seed=2) == {"seed": 2, "x": 3.5}
  assert again.find(seed=2, x=2.5) is None and again.find(y=1) is None
  again.add({"seed": 3}, setting="2", result="4.5", state_bytes=7)
  content = json.loads((tmp_path / "task-step3.json").read_text())
  assert [one["seed"] for one in content["slices"]] == [1, 2, 3]
  assert content["step"] == 3 and len(content["weights"]) == 16
  assert content["config"]["seed"] == 7 and "jax" in content["versions"]

  lines = (tmp_path / "results.md").read_text().splitlines()
  assert lines[0].startswith("| task | setting | result |")
  assert [line.split(" | ")[1:4] for line in lines[3:]] == [["2", "4.5", "7"]]
  assert lines[2].startswith("| task | 1 \\| a | 2.5 |")
  assert "tiny: trellis" in lines[2] and "task-step3.json |" in lines[2]


def test_other_weights_and_other_files_are_refused(run_folder, tmp_path):
  opened = load.open_checkpoint(run_folder)
  slices.Slices(tmp_path, "task", opened).add(
    {}, setting="", result="", state_bytes=7
  )
  before = (tmp_path / "task-step3.json").read_bytes()

  config = cases.tiny_config()
  config.seed = 8
  config.name = "tiny"
  cases.save(tmp_path / "other", config, 3)
  other = load.open_checkpoint(tmp_path / "other")
  assert slices.weights(other.model) != slices.weights(opened.model)
  with pytest.raises(errors.UserError, match=r"another model.*weights.*--out"):
    slices.Slices(tmp_path, "task", other)
  assert (tmp_path / "task-step3.json").read_bytes() == before

  for content in ('{"slices": [', "[]", '{"slices": [1]}', "1" * 5000):
    (tmp_path / "half-step3.json").write_text(content)
    with pytest.raises(errors.UserError, match=r"no result of half.*--out"):
      slices.Slices(tmp_path, "half", opened)


def test_a_folder_that_was_moved_keeps_its_results(run_folder, tmp_path):
  """The tokenizer's path is another; its fingerprint tells whether it is."""
  opened = load.open_checkpoint(run_folder)
  slices.Slices(tmp_path, "task", opened).add(
    {"seed": 1}, setting="", result="", state_bytes=7
  )
  opened.config.data.tokenizer = "elsewhere/tokenizer.json"
  assert slices.Slices(tmp_path, "task", opened).find(seed=1)
  path = tmp_path / "task-step3.json"
  content = json.loads(path.read_text())
  for other in ({"fingerprint": "0" * 16}, None, "bytes"):
    path.write_text(json.dumps(content | {"tokenizer": other}))
    with pytest.raises(errors.UserError, match="its tokenizer differs"):
      slices.Slices(tmp_path, "task", opened)


def test_the_table_takes_names_of_any_bytes(tmp_path):
  cells = ("task", "1", "2.5", "7", "é \udcff", "x.json")
  slices.add_line(tmp_path / "results.md", cells)
  slices.add_line(tmp_path / "results.md", cells)
  lines = (tmp_path / "results.md").read_bytes().splitlines()
  assert len(lines) == 3 and "é ".encode() + b"\xff" in lines[2]


def test_two_evaluations_at_once_keep_each_others_slices(run_folder, tmp_path):
  opened = load.open_checkpoint(run_folder)
  ours, theirs = (slices.Slices(tmp_path, "task", opened) for _ in range(2))
  theirs.add({"seed": 1, "x": 1.5}, setting="1", result="1.5", state_bytes=7)
  ours.add({"seed": 2, "x": 2.5}, setting="2", result="2.5", state_bytes=7)
  # Both found it, as when the same command is started twice.
  theirs.add({"seed": 2, "x": 2.5}, setting="2", result="2.5", state_bytes=7)
  content = json.loads((tmp_path / "task-step3.json").read_text())
  assert [one["seed"] for one in content["slices"]] == [1, 2]
  lines = (tmp_path / "results.md").read_text().splitlines()
  assert [line.split(" | ")[1] for line in lines[2:]] == ["1", "2"]
  assert not list(tmp_path.glob(".*"))


def test_a_full_disk_may_leave_the_line_to_the_next_call(run_folder, tmp_path):
  """The table then gets its line, and the file is not written again."""
  found = slices.Slices(tmp_path, "task", load.open_checkpoint(run_folder))
  key, none = {"task_hash": "a", "seed": 1}, pytest.fail
  how = {"setting": "1", "result": lambda one: f"{one['x']}"}
  one = key | {"x": 2.5, "state_bytes": 7}
  assert found.find_or_measure(key, lambda: one, **how) == (one, "")
  path, table = tmp_path / "task-step3.json", tmp_path / "results.md"
  written, lines = path.stat().st_mtime_ns, table.read_text()
  for left in ("", lines.replace("| 2.5 |", "| 2.4 |")):
    table.write_text(left)
    assert found.find_or_measure(key, none, **how) == (one, "done before")
    assert table.read_text() == lines
  assert path.stat().st_mtime_ns == written


def test_a_damaged_slice_is_refused(run_folder, tmp_path):
  opened = load.open_checkpoint(run_folder)
  key = {"task_hash": "a", "seed": 1}
  how = {"setting": "1", "result": lambda one: f"{one['x'] / 2}"}
  good = key | {"x": 2.5, "state_bytes": 7}
  slices.Slices(tmp_path, "task", opened).find_or_measure(
    key, lambda: good, **how
  )
  path = tmp_path / "task-step3.json"
  content = json.loads(path.read_text())
  for damage in ({"x": "2.5"}, {"x": None}, {"state_bytes": "many"}):
    path.write_text(json.dumps(content | {"slices": [good | damage]}))
    before = path.read_bytes()
    found = slices.Slices(tmp_path, "task", opened)
    with pytest.raises(errors.UserError, match="no result of task; move"):
      found.find_or_measure(key, pytest.fail, **how)
    assert path.read_bytes() == before
  # What was just measured is not damaged: that is a fault of the program.
  fresh = slices.Slices(tmp_path / "fresh", "task", opened)
  with pytest.raises(TypeError):
    fresh.find_or_measure(key, lambda: {"x": None, "state_bytes": 7}, **how)


def test_results_of_an_older_version_go_on(run_folder, tmp_path):
  """Before a field was there it was at its default; it is the same model."""
  opened = load.open_checkpoint(run_folder)
  slices.Slices(tmp_path, "task", opened).add(
    {"seed": 1}, setting="", result="", state_bytes=7
  )
  path = tmp_path / "task-step3.json"
  content = json.loads(path.read_text())
  del content["config"]["model"]["mixers"]["memory"]["solver"]
  del content["config"]["training"]["z_loss"]
  content["config"]["mesh"]["fsdp"] = 2  # of the machine, not of the model
  path.write_text(json.dumps(content))
  assert slices.Slices(tmp_path, "task", opened).find(seed=1)
  content["config"]["training"]["z_loss"] = 0.5
  path.write_text(json.dumps(content))
  with pytest.raises(
    errors.UserError, match=r"another model.*training\.z_loss"
  ):
    slices.Slices(tmp_path, "task", opened)
  del content["config"]
  path.write_text(json.dumps(content))
  with pytest.raises(errors.UserError, match="another model"):
    slices.Slices(tmp_path, "task", opened)


UNSCORED = {
  "text": {"name": "a"},
  "trained_length": {"bits_per_byte": None, "bytes": 0},
}
TIMED = {"context": 8, "state_bytes": 7, "peak_bytes": 9}
TIMED |= {"seconds_per_token": 0.5, "read_tokens_per_second": 2.0}


@pytest.mark.parametrize("task", ["perplexity", "throughput"])
def test_a_result_is_not_replaced_by_that_of_another_model(
  task, call, run_folder, tmp_path, monkeypatch
):
  monkeypatch.setattr(run.tasks, "measure", lambda *_: UNSCORED)
  monkeypatch.setattr(run.throughput, "measure", lambda *_, **__: [TIMED])
  out = tmp_path / "shared"
  path = out / f"{task}.json"

  def evaluate(folder):
    return call(f"--checkpoint={folder}", f"--task={task}", f"--out={out}")

  for _ in range(2):  # its own is replaced
    assert evaluate(run_folder)[0] == 0
  before = {p: p.read_bytes() for p in out.iterdir()}
  config = load.open_checkpoint(run_folder).config
  other = dataclasses.replace(config, seed=8)
  params = cases.tiny_params(other)
  cases.save(tmp_path / "seed", other, 4)
  cases.save(tmp_path / "weights", config, 3, params=params)
  with monkeypatch.context() as patch:
    # Refused before it takes any time.
    patch.setattr(run.tasks, "measure", None)
    patch.setattr(run.throughput, "measure", None)
    for name, what in (("seed", "(seed was 7"), ("weights", "weights differ")):
      code, _, err = evaluate(tmp_path / name)
      assert code == errors.EXIT_BAD_INPUT and err.count("\n") == 1
      assert f"{task}.json holds results of another model" in err
      assert what in err and "choose another --out" in err
  assert {p: p.read_bytes() for p in out.iterdir()} == before

  cases.save(run_folder, config, 4, params=params)  # the run has gone on
  assert evaluate(run_folder)[0] == 0
  content = json.loads(path.read_text())
  assert content["step"] == 4
  del content["weights"]  # as of an earlier version
  path.write_text(json.dumps(content))
  assert evaluate(run_folder)[0] == 0
  path.write_text("[]")
  code, _, err = evaluate(run_folder)
  assert code == errors.EXIT_BAD_INPUT and f"no result of {task}; move" in err
