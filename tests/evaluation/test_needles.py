import itertools
import json
import shutil

import evaluation_cases as cases
import pytest

from memcomp import errors
from memcomp.data.synthetic import niah as questions_lib
from memcomp.data.synthetic import niah_task, stand_in
from memcomp.evaluation import haystacks, load, niah
from memcomp.inference import complete

KEYS = questions_lib.Keys(stand_in.ADJECTIVES, stand_in.NOUNS)


@pytest.fixture(scope="module")
def asked(trained, tmp_path_factory):
  """A folder with the results of two slices, by the command line."""
  folder = tmp_path_factory.mktemp("niah")
  found = niah.run(
    load.open_checkpoint(trained),
    folder,
    contexts=["1024", "950"],
    needles=["single_1"],
    samples=3,
    rows=2,
  )
  assert [path.name for path in found] == [
    "niah-step3.json",
    "results.md",
    "niah-step3.png",
  ]
  return folder


def slices_of(folder):
  return json.loads((folder / "niah-step3.json").read_text())["slices"]


def test_what_is_written(asked):
  content = json.loads((asked / "niah-step3.json").read_text())
  assert content["seed"] == 7 and content["versions"] and content["weights"]
  one, other = content["slices"]
  assert (one["task"], one["label"]) == ("niah_single_1-pd", "ruler-like")
  assert one["deviations"] == ["words"] and one["words"] == KEYS.fingerprint
  assert (one["context"], other["context"]) == (1024, 950)
  assert one["seed"] == 42 and one["samples"] == len(one["answers"]) == 3
  assert one["task_hash"] != other["task_hash"]
  assert one["state_bytes"] > 0
  assert max(one["tokens"]) <= 1024
  assert cases.is_figure(asked / "niah-step3.png")
  lines = (asked / "results.md").read_text().splitlines()
  assert len(lines) == 4
  assert "niah_single_1-pd, 950 tokens, 3 samples, seed 42" in lines[3]
  assert f"loose {other['loose']:.2f}" in lines[3]


def test_answers_are_those_of_a_question_alone(asked, trained):
  opened = load.open_checkpoint(trained)
  (one, _) = slices_of(asked)
  drawn = questions_lib.samples(
    kind="number",
    keys=KEYS,
    haystack=questions_lib.Noise(),
    max_tokens=1024,
    count_tokens=len,
    num_samples=3,
  )
  for question, text in zip(drawn, one["answers"], strict=True):
    (answer,), size = complete.complete(
      opened.model,
      opened.tokenizer,
      [opened.tokenizer.encode(question.prompt)],
      tokens=128,
      rows=2,
    )
    assert text == answer
    assert one["state_bytes"] == size


@pytest.mark.slow
def test_done_slices_are_kept(asked, trained, tmp_path, call, monkeypatch):
  out = shutil.copytree(asked, tmp_path / "out")
  content = json.loads((out / "niah-step3.json").read_text())
  content["slices"].pop()  # as if it had been killed after the first
  (out / "niah-step3.json").write_text(json.dumps(content))
  measured = []
  measure = niah.measure

  def counted(opened, task, *rest):
    measured.append(task["context"])
    return measure(opened, task, *rest)

  monkeypatch.setattr(niah, "measure", counted)
  given = ("--needles=single_1", "--samples=3", "--rows=2", f"--out={out}")
  command = f"--checkpoint={trained}", "--task=niah", *given
  code, shown, err = call(*command, "--contexts=1024,950")
  assert (code, err) == (0, "")
  assert measured == [950]
  # Nothing differs from the run that was not killed.
  for name in ("niah-step3.json", "results.md"):
    assert (out / name).read_bytes() == (asked / name).read_bytes()
  lines = shown.splitlines()
  assert [line.endswith("done before") for line in lines[2:4]] == [True, False]
  assert lines[-3].endswith("niah-step3.json")

  before = (out / "results.md").read_text()
  code, _, _ = call(*command, "--contexts=950", "--seed=1")
  assert code == 0 and measured == [950, 950]
  assert [one["seed"] for one in slices_of(out)] == [42, 42, 1]
  # A line for each, also of other words.
  (tmp_path / "adjectivelist.txt").write_text("red\nold\n")
  (tmp_path / "nounlist.txt").write_text("fox\nowl\n")
  code, _, _ = call(*command, "--contexts=950", f"--word_list={tmp_path}")
  assert code == 0 and len(slices_of(out)) == 4
  table = (out / "results.md").read_text()
  assert table.startswith(before) and table.count("\n") == 2 + 4
  hashes = [one["questions_hash"] for one in slices_of(out)]
  assert len(set(hashes)) == 4


def test_scores(trained, monkeypatch, tmp_path):
  answers = iter(
    [" {v} is it", "\n{v}", "it is {V}", "it is\x00{v}.", "no", " 7{v}"]
  )
  prompts = []

  def answer(model, tokenizer, batch, *, tokens, rows):
    assert tokens == 128
    made = []
    for prompt in map(tokenizer.decode, batch):
      prompts.append(prompt)
      value = prompt.split(" is: ")[1].split(".\n")[0].split(". ")[0]
      text = next(answers)
      made.append(text.replace("{v}", value).replace("{V}", value.upper()))
    return made, 77

  monkeypatch.setattr(complete, "complete", answer)
  niah.run(
    load.open_checkpoint(trained),
    tmp_path,
    contexts=[5000],
    needles=["single_3"],
    samples=6,
    rows=4,
  )
  (one,) = slices_of(tmp_path)
  assert one["task"] == "niah_single_3-pd"
  assert one["deviations"] == ["words", "essay", "sentences"]
  assert one["found"] == [True, True, True, True, False, True]
  assert one["begins"] == [True, True, False, False, False, False]
  assert (one["loose"], one["strict"]) == (83.33, 33.33)
  assert one["state_bytes"] == 77
  drawn = list(
    itertools.islice(
      questions_lib.samples(
        kind="uuid",
        keys=KEYS,
        haystack=questions_lib.Essay(stand_in.ESSAY),
        max_tokens=5000,
        count_tokens=len,
      ),
      6,
    )
  )
  assert prompts == [question.prompt for question in drawn]
  assert one["depth"] == [question.depth for question in drawn]


@pytest.mark.slow
def test_with_everything_of_the_benchmark_it_is_exact(trained, monkeypatch):
  opened = load.open_checkpoint(trained)
  monkeypatch.setitem(haystacks.SPLITTERS, "punkt", lambda: str.splitlines)
  material = haystacks.Material(
    haystacks.read_words("wonderwords"), "One.\nTwo.", "punkt", True
  )
  tasks = {
    name: niah.describe(name, 4096, material, opened, 500, 42)
    for name in questions_lib.NEEDLES
  }
  assert {task["label"] for task in tasks.values()} == {"ruler-exact"}
  assert tasks["single_2"]["task"] == "niah_single_2"
  assert len({task["task_hash"] for task in tasks.values()}) == 3
  regex = haystacks.Material(material.keys, material.essay, "regex", True)
  task = niah.describe("single_2", 4096, regex, opened, 500, 42)
  assert (task["label"], task["deviations"]) == ("ruler-like", ["sentences"])
  task = niah.describe("single_1", 4096, regex, opened, 500, 42)
  assert task["label"] == "ruler-exact"


def test_a_model_of_needles_is_asked_for_its_own(
  trained, monkeypatch, tmp_path
):
  """Where it was trained, and beyond."""
  opened = load.open_checkpoint(trained)
  opened.config.data.task = niah_task.NiahConfig(context=1000)
  monkeypatch.setattr(complete, "complete", lambda *_, **__: ([""] * 50, 0))
  monkeypatch.setattr(
    niah, "_questions", lambda task, *_: iter([_QUESTION] * task["samples"])
  )
  niah.run(opened, tmp_path, rows=50)
  assert [
    (one["needle"], one["context"], one["samples"])
    for one in slices_of(tmp_path)
  ] == [("single_1", 1000 * times, 100) for times in (1, 2, 4, 8)]


def test_what_is_named_twice_is_asked_once(
  trained, monkeypatch, tmp_path, capsys
):
  monkeypatch.setattr(complete, "complete", lambda *_, **__: ([""], 0))
  niah.run(
    load.open_checkpoint(trained),
    tmp_path,
    contexts=[1100, 1000, 1100],
    needles=["single_1", "single_1"],
    samples=1,
  )
  lines = capsys.readouterr().out.splitlines()[2:]
  assert [line.split()[1] for line in lines] == ["1,100", "1,000"]


_QUESTION = questions_lib.Sample("?", "7", 0.5, 9)


def test_own_words_and_essay(tmp_path):
  (tmp_path / "adjectivelist.txt").write_text("red \nold\n\n")
  (tmp_path / "nounlist.txt").write_text("fox\n")
  keys = haystacks.read_words(str(tmp_path))
  assert list(keys) == ["old-fox", "red-fox"]
  essay = tmp_path / "essay.json"
  essay.write_text('{"text": "One. Two."}')
  assert haystacks.read_essay(str(essay)) == "One. Two."
  (tmp_path / "essay.txt").write_text("Three.")
  assert haystacks.read_essay(str(tmp_path / "essay.txt")) == "Three."

  (tmp_path / "nounlist.txt").write_text("\n")
  essay.write_text('["text"]')
  (tmp_path / "number.json").write_text('{"text": 3}')
  (tmp_path / "empty.txt").write_text(" \n")
  (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
  for function, name, said in (
    (haystacks.read_words, "", "nounlist.txt is empty"),
    (haystacks.read_words, "absent", "cannot read adjectivelist.txt"),
    (haystacks.read_essay, "essay.json", "no JSON object with a text"),
    (haystacks.read_essay, "number.json", "no JSON object with a text"),
    (haystacks.read_essay, "empty.txt", "is empty"),
    (haystacks.read_essay, "absent.txt", "cannot read absent.txt"),
    (haystacks.read_essay, "latin.txt", r"not UTF-8 \(byte 3\)"),
  ):
    with pytest.raises(errors.UserError, match=said):
      function(str(tmp_path / name))


@pytest.mark.parametrize(
  ("given", "said"),
  [
    (["--contexts=600"], "more than 600; give larger --contexts"),
    (["--contexts=1024"], "niah_single_2-pd at 1,024 tokens"),
    (["--contexts=1k"], "whole numbers"),
    (["--needles=single_4"], "single_1 or single_2 or single_3"),
    (["--samples=0"], "1 or more"),
    (["--sentences=words"], "regex or punkt"),
    (["--essay_file=absent"], "cannot read absent"),
    (["--lengths=4"], "--lengths means nothing to --task=niah"),
  ],
)
def test_what_cannot_be_is_said(call, trained, tmp_path, given, said):
  code, _, err = call(
    f"--checkpoint={trained}", "--task=niah", f"--out={tmp_path}", *given
  )
  assert code == 2 and said in err
  assert err.count("\n") == 1
  assert not list(tmp_path.glob("niah*"))


def test_lengths_that_hold_nothing_are_left_out(
  trained, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(
    complete, "complete", lambda m, t, texts, **_: (["x"] * len(texts), 1)
  )
  niah.run(load.open_checkpoint(trained), tmp_path, samples=1)
  out = capsys.readouterr().out
  assert out.count("left out: ") == 4
  found = {(one["needle"], one["context"]) for one in slices_of(tmp_path)}
  lengths = {
    "single_1": [1024, 2048, 4096, 8192],
    "single_2": [4096, 8192],
    "single_3": [4096, 8192],
  }
  assert found == {(k, n) for k, values in lengths.items() for n in values}


@pytest.mark.parametrize(
  ("task", "flag"),
  [
    ("sample", "--needles=single_1"),
    ("sample", "--source=notes"),
    ("sample", "--out=there"),
    ("chat", "--lengths=3"),
    ("perplexity", "--tokens=3"),
    ("perplexity", "--contexts=9"),
    ("perplexity", "--stop=x"),
    ("throughput", "--prompt_file=absent"),
    ("niah", "--source=notes"),
    ("compare", "--step=2"),
    ("compare", "--rows=2"),
    ("compare", "--tensor=2"),
    ("capacity", "--tensor=2"),
    ("capacity", "--step=2"),
  ],
)
def test_flags_of_one_task_are_refused_by_others(task, flag, call, trained):
  checkpoint = () if task == "capacity" else (f"--checkpoint={trained}",)
  code, _, err = call(*checkpoint, f"--task={task}", flag)
  assert code == 2
  name = flag.partition("=")[0]
  assert err == f"error: {name} means nothing to --task={task}; leave it out\n"
