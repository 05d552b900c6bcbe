"""lm-evaluation-harness over a tiny checkpoint.

Tests marked `harness` need the extra `eval`:

  pip install -e ".[test,eval]"
  python -m pytest -n 0 -m harness tests/evaluation/test_harness.py
"""

import functools
import importlib.util
import json
import os
import pathlib
import shutil
import sys

import evaluation_cases as cases
import jax
import numpy as np
import odd_tokenizers
import pytest

from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import harness, likelihood, load
from memcomp.inference import complete, generate, sample

TASKS = pathlib.Path(__file__).parent / "harness_tasks"
NAMES = ("choices", "last_words", "pages", "questions")

needs_harness = pytest.mark.skipif(
  importlib.util.find_spec("lm_eval") is None, reason="needs the extra eval"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
  """What `harness.run` sets is of one test."""
  names = "TQDM_DISABLE", "DISABLE_MULTIPROC", "HF_HOME", "XDG_CACHE_HOME"
  for name in (*harness._OFFLINE, *names):
    monkeypatch.setenv(name, os.environ.get(name, ""))


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
  assert err.count("\n") == 1 and 'pip install -e ".[eval]"' in err
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


@pytest.mark.slow
def test_completions_of_a_batch_are_those_of_each_alone(trained):
  opened = load.open_checkpoint(trained)
  prompts = ["a", "On and on and on, as long as there are lines. ", "The end"]
  texts = [opened.tokenizer.encode(prompt) for prompt in prompts]
  drawn = [sample.Settings(temperature=0.7, seed=i) for i in range(3)]
  for settings, stops in ((complete.GREEDY, []), (drawn, ["e", "\n", "a!"])):
    found, size = complete.complete(
      opened.model,
      opened.tokenizer,
      texts,
      tokens=24,
      rows=4,
      settings=settings,
      stop_strings=stops,
    )
    assert size > 0 and len(found) == 3
    for row, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
      one = settings if isinstance(settings, sample.Settings) else settings[row]
      alone = generate.text(
        opened.model,
        opened.tokenizer,
        prompt,
        tokens=24,
        settings=one,
        stop_strings=stops,
      )
      assert answer == "".join(alone)


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


@functools.cache
def whole_logits(folder):
  opened = load.open_checkpoint(folder)

  @jax.jit
  def run(ids):
    return opened.model(ids)[0]

  return opened, run


def log_likelihood(folder, context, continuation):
  """Of the whole text at once, without a state; and whether it is greedy."""
  opened, run = whole_logits(folder)
  encode = opened.tokenizer.encode
  ids = encode(context + continuation).astype(np.int32)
  # What stands behind a text cannot reach it.
  padded = np.pad(ids, (0, 512 - len(ids)))[None]
  first = len(encode(context)) - 1
  row = np.asarray(run(padded), np.float64)[first : len(ids) - 1]
  wanted = ids[first + 1 :]
  chosen = row[np.arange(len(wanted)), wanted]
  total = (chosen - np.logaddexp.reduce(row, axis=-1)).sum()
  return total, bool((row.argmax(-1) == wanted).all())


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
  assert found["pages"]["longest"] == 1 + max(map(len, pages))
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


class Hook:
  """Keeps what a model puts into the harness's cache."""

  def __init__(self):
    self.kept = []

  def add_partial(self, kind, arguments, answer):
    self.kept.append((kind, tuple(arguments), answer))


@pytest.fixture
def adapter(trained):
  from memcomp.evaluation import harness_model

  model = harness_model.Model(load.open_checkpoint(trained), rows=4)
  model.set_cache_hook(Hook())
  return model


def instances(kind, *arguments):
  from lm_eval.api import instance

  return [
    instance.Instance(request_type=kind, doc={}, arguments=one, idx=i)
    for i, one in enumerate(arguments)
  ]


@pytest.mark.harness
@needs_harness
def test_log_likelihoods_of_requests(adapter, trained):
  asked = [
    ("A line", " of text"),
    ("", "no context"),
    ("A line ", "of text"),  # the space goes over
    ("A line", " of words"),
    ("B" * 70, "C"),
    ("A line", ""),
    ("  ", "spaces"),
    ("", "\nline"),  # begins with what stands for no context
    ("", ""),
  ]
  found = adapter.loglikelihood(instances("loglikelihood", *asked))
  wanted = [
    log_likelihood(trained, context, continuation)
    for context, continuation in [
      asked[0],
      ("\n", "no context"),
      asked[0],
      asked[3],
      asked[4],
    ]
  ]
  for (total, greedy), (total_, greedy_) in zip(found[:5], wanted, strict=True):
    assert total == pytest.approx(total_, rel=1e-4) and greedy == greedy_
  assert found[5] == (0.0, True)
  total, greedy = log_likelihood(trained, "\n", "  spaces")
  assert found[6] == (pytest.approx(total, rel=1e-4), greedy)
  total, greedy = log_likelihood(trained, "\n", "\nline")
  assert found[7] == (pytest.approx(total, rel=1e-4), greedy)
  assert found[8] == (0.0, True)
  kept = {arguments: answer for _, arguments, answer in adapter.cache_hook.kept}
  assert [kept[one] for one in asked] == found
  assert adapter.longest == 71 and adapter.beyond == 1


@pytest.mark.harness
@needs_harness
def test_documents_in_windows(adapter, trained):
  from memcomp.evaluation import harness_model

  opened = load.open_checkpoint(trained)
  model = harness_model.Model(opened, rows=4, rolling="window")
  model.set_cache_hook(Hook())
  texts = [("abcdefgh" * 9,), ("short",), ("",)]
  found = model.loglikelihood_rolling(
    instances("loglikelihood_rolling", *texts)
  )
  text = texts[0][0]
  # Windows of 32; the last is whole, but only what is new counts.
  wanted = (
    log_likelihood(trained, "\n", text[:32])[0]
    + log_likelihood(trained, text[31], text[32:64])[0]
    + log_likelihood(trained, text[39:64], text[64:])[0]
  )
  assert found[0] == pytest.approx(wanted, rel=1e-4)
  assert found[1] == pytest.approx(
    log_likelihood(trained, "\n", "short")[0], rel=1e-4
  )
  assert found[2] == 0
  whole = adapter.loglikelihood_rolling(
    instances("loglikelihood_rolling", *texts)
  )
  assert whole[0] == pytest.approx(
    log_likelihood(trained, "\n", text)[0], rel=1e-4
  )
  kept = {arguments: answer for _, arguments, answer in adapter.cache_hook.kept}
  assert [kept[one] for one in texts[:2]] == whole[:2]


@pytest.mark.harness
@needs_harness
def test_generation_of_requests(adapter, trained):
  opened = load.open_checkpoint(trained)
  contexts = ["a", "On and on, as long as there are lines. " * 3, "The end", ""]
  endless = {"until": [], "max_gen_toks": 20, "do_sample": False}
  asked = [(context, endless) for context in contexts]
  whole = adapter.generate_until(instances("generate_until", *asked))

  def alone(context):
    pieces = generate.text(
      opened.model,
      opened.tokenizer,
      context or "\n",
      tokens=20,
      settings=complete.GREEDY,
    )
    return "".join(pieces)

  assert whole == [alone(context) for context in contexts]
  kept = [
    (arguments[0], answer) for _, arguments, answer in adapter.cache_hook.kept
  ]
  assert sorted(kept) == sorted(zip(contexts, whole, strict=True))


@pytest.mark.harness
@needs_harness
def test_answers_end_at_stop_strings(adapter):
  def answer(**given):
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 40}
    asked = "A line", settings | given
    return adapter.generate_until(instances("generate_until", asked))[0]

  text = answer()
  # A byte that is no text is no stop string.
  place = next(i for i in range(5, 40) if text[i] not in text[:i] + "\ufffd")
  for until in (text[place], ["not there", text[place], ""]):
    assert answer(until=until) == text[:place]
  assert answer(max_gen_toks=3) in (text[:1], text[:2], text[:3])


@pytest.mark.harness
@needs_harness
def test_samples_differ_between_repeats(adapter):
  settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 20}
  asked = [("a", settings), ("a", settings)]
  first, second = adapter.generate_until(instances("generate_until", *asked))
  assert first != second
  again = adapter.generate_until(instances("generate_until", *asked))
  assert again == [first, second]


@pytest.mark.harness
@needs_harness
def test_requests_with_a_common_context_share_its_reading(adapter, monkeypatch):
  asked, score = [], likelihood.score

  def counted(model, requests, **given):
    asked.extend(requests)
    return score(model, requests, **given)

  monkeypatch.setattr(likelihood, "score", counted)
  adapter.loglikelihood(
    instances("loglikelihood", *[("Which?", f" {i}") for i in range(4)])
  )
  assert len({one.context.tobytes() for one in asked}) == 1


@pytest.mark.harness
@needs_harness
@pytest.mark.parametrize("name", odd_tokenizers.CASES)
def test_any_tokenizer_has_a_token_before_a_text(name, trained, tmp_path):
  from memcomp.evaluation import harness_model

  make, text = odd_tokenizers.CASES[name]
  tokenizer = tokenizer_lib.load(odd_tokenizers.save(make(), tmp_path))
  opened = load.open_checkpoint(trained)._replace(tokenizer=tokenizer)
  model = harness_model.Model(opened, rows=2)
  expected = {
    "special": tokenizer.vocab_size - 1,
    # A line's end; a space; nothing of the kind.
    **dict.fromkeys(["normalised", "prefixed"], tokenizer.encode("\n")[-1:]),
    "metaspace": 0,
    **dict.fromkeys(["stripped", "words", "word_piece"], 0),
  }[name]
  assert model.prefix_token_id == expected
  if tokenizer.vocab_size <= 256:
    asked = instances("loglikelihood", ("", text), (text, text))
    assert all(np.isfinite(x) for x, _ in model.loglikelihood(asked))
