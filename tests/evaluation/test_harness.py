"""lm-evaluation-harness over a tiny checkpoint.

Tests marked `harness` need the extra `eval`:

  pip install -e ".[test,eval]"
  python -m pytest -n 0 -m harness tests/evaluation/test_harness*.py
"""

import functools
import json
import os
import pathlib
import shutil
import sys

import evaluation_cases as cases
import numpy as np
import pytest
from harness_cases import log_likelihood, needs_harness

from memcomp.evaluation import harness, load

pytestmark = pytest.mark.usefixtures("environment")

TASKS = pathlib.Path(__file__).parent / "harness_tasks"
NAMES = ("choices", "last_words", "pages", "questions")


def test_without_a_home_no_folder_of_its_name_is_made(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  harness._set_environment(allow_downloads=False)
  assert not os.environ["HF_HOME"]
  monkeypatch.delenv("HOME")
  monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
  harness._set_environment(allow_downloads=False)
  assert pathlib.Path(os.environ["HF_HOME"]).is_dir()
  for name in ("HF_HOME", "XDG_CACHE_HOME"):
    monkeypatch.setenv(name, "given")
    harness._set_environment(allow_downloads=False)
    assert os.environ[name] == "given"
    monkeypatch.setenv("HF_HOME", "")


def test_the_extra_is_asked_for(call, trained, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  code, _, err = call(
    f"--checkpoint={trained}",
    "--task=harness",
    "--tasks=piqa",
    f"--out={tmp_path}",
  )
  assert code == 2
  assert err.count("\n") == 1 and "pip install 'memcomp[eval]'" in err
  # Nothing is downloaded that nobody asked for.
  assert (
    os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
  )
  call(
    f"--checkpoint={trained}",
    "--task=harness",
    "--tasks=piqa",
    "--allow_downloads",
    f"--out={tmp_path}",
  )
  assert (
    os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "0"
  )


@pytest.mark.parametrize(
  ("given", "said"),
  [
    ([], "--tasks is missing"),
    (["--tasks=a", "--rolling=never"], "stream or window"),
    (["--tasks=a", "--include_path=absent"], "absent is no folder"),
    (["--tasks=a", "--limit=0"], "1 or more"),
    (["--tasks=a", "--fewshot=-1"], "0 or more"),
  ],
)
def test_bad_flags(call, trained, tmp_path, given, said):
  code, _, err = call(
    f"--checkpoint={trained}", "--task=harness", f"--out={tmp_path}", *given
  )
  assert code == 2 and said in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def measured(trained, tmp_path_factory):
  """The folder with the results of the four local tasks."""
  folder = tmp_path_factory.mktemp("harness")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("HF_HOME", str(folder / "cache"))
    written = harness.run(
      load.open_checkpoint(trained),
      folder,
      tasks=[f"memcomp_{name}" for name in NAMES],
      include_path=str(TASKS),
      rows=4,
    )
  assert [path.name for path in written] == [
    "harness-step3.json",
    "results.md",
    "harness-step3.png",
  ]
  return folder


def figures_of(folder):
  slices = json.loads((folder / "harness-step3.json").read_text())["slices"]
  return {one["task"].removeprefix("memcomp_"): one for one in slices}


def documents(name):
  sys.path.insert(0, str(TASKS))
  try:
    import documents
  finally:
    sys.path.pop(0)
  return list(getattr(documents, name)()["test"])


@pytest.mark.harness
@needs_harness
def test_choices(measured, trained):
  right, right_by_length = [], []
  for document in documents("choices"):
    sums = np.array(
      [
        log_likelihood(trained, document["question"], " " + choice)[0]
        for choice in document["choices"]
      ]
    )
    lengths = np.array([len(choice) for choice in document["choices"]])
    right.append(sums.argmax() == document["answer"])
    right_by_length.append((sums / lengths).argmax() == document["answer"])
  found = figures_of(measured)["choices"]["figures"]["memcomp_choices"]
  assert found["acc"] == pytest.approx(np.mean(right))
  assert found["acc_norm"] == pytest.approx(np.mean(right_by_length))
  assert 0 < found["acc"] < 1 or 0 < found["acc_norm"] < 1


@pytest.mark.harness
@needs_harness
def test_last_words_and_pages(measured, trained):
  sums = [
    log_likelihood(trained, d["text"], " " + d["word"])[0]
    for d in documents("last_words")
  ]
  found = figures_of(measured)
  perplexity = found["last_words"]["figures"]["memcomp_last_words"][
    "perplexity"
  ]
  assert perplexity == pytest.approx(np.exp(-np.mean(sums)), rel=1e-3)

  pages = [d["page"] for d in documents("pages")]
  sums = [log_likelihood(trained, "\n", page)[0] for page in pages]
  bits = -np.sum(sums) / np.log(2) / sum(map(len, pages))
  own = found["pages"]["figures"]["memcomp_pages"]
  assert own["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
  assert found["pages"]["rolling"] == "stream"
  assert found["pages"]["prefix_token"] == 10
  assert found["pages"]["longest"] == max(map(len, pages))
  assert found["pages"]["beyond_trained"] == 4


@pytest.mark.harness
@needs_harness
def test_what_is_written(measured):
  content = json.loads((measured / "harness-step3.json").read_text())
  assert content["seed"] == 7 and content["weights"] and content["config"]
  found = figures_of(measured)
  assert list(found) == list(NAMES)
  for name, count in zip(NAMES, (7, 5, 5, 5), strict=True):
    assert found[name]["documents"] == {f"memcomp_{name}": count}
    assert len(found[name]["task_hash"]) == 16
  assert cases.is_figure(measured / "harness-step3.png")
  lines = (measured / "results.md").read_text().splitlines()[2:]
  assert len(lines) == 4
  assert "| memcomp_choices, 7 documents | acc 0." in lines[0]


@pytest.mark.harness
@needs_harness
def test_done_tasks_are_kept(measured, trained, tmp_path, call, monkeypatch):
  out = shutil.copytree(measured, tmp_path / "out")
  content = json.loads((out / "harness-step3.json").read_text())
  content["slices"] = content["slices"][:3]
  (out / "harness-step3.json").write_text(json.dumps(content))
  import lm_eval

  evaluate, asked = lm_eval.simple_evaluate, []

  def counted(**given):
    asked.extend(given["tasks"])
    return evaluate(**given)

  monkeypatch.setattr(lm_eval, "simple_evaluate", counted)
  names = ",".join(f"memcomp_{name}" for name in NAMES)
  command = (
    f"--checkpoint={trained}",
    "--task=harness",
    f"--tasks={names}",
    f"--include_path={TASKS}",
    "--rows=4",
    f"--out={out}",
  )
  code, shown, _ = call(*command)
  assert code == 0
  assert [task.task_name for task in asked] == ["memcomp_questions"]
  assert shown.count("done before") > 3
  for name in ("harness-step3.json", "results.md"):
    assert (out / name).read_bytes() == (measured / name).read_bytes()

  # Window by window it is another task; nothing of the old is lost.
  code, _, _ = call(
    *command[:2], "--tasks=memcomp_pages", *command[3:], "--rolling=window"
  )
  assert code == 0
  slices = json.loads((out / "harness-step3.json").read_text())["slices"]
  assert [one["rolling"] for one in slices] == ["stream"] * 4 + ["window"]
  table = (out / "results.md").read_text()
  assert table.startswith((measured / "results.md").read_text())
  assert ", rolling window |" in table
  bits = [
    one["figures"]["memcomp_pages"]["bits_per_byte"]
    for one in slices
    if one["task"] == "memcomp_pages"
  ]
  assert bits[0] != bits[1]


@pytest.mark.harness
@needs_harness
def test_unknown_tasks_are_said(call, trained, tmp_path, monkeypatch):
  from lm_eval import tasks as tasks_lib

  # It reads thousands of files.
  manager = functools.cache(tasks_lib.TaskManager)
  monkeypatch.setattr(tasks_lib, "TaskManager", manager)
  command = f"--checkpoint={trained}", "--task=harness", f"--out={tmp_path}"
  given = *command, f"--include_path={TASKS}"
  code, _, err = call(*given, "--tasks=memcomp_choice")
  assert code == 2 and "did you mean memcomp_choices" in err
  # Its data are not there, and are not fetched.
  code, _, err = call(*given, "--tasks=arc_easy")
  assert code == 2 and "arc_easy cannot be loaded" in err
  assert "--allow_downloads" in err and err.count("\n") == 1
  assert not list(tmp_path.glob("harness*"))
