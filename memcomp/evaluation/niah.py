"""Needles in haystacks on a checkpoint: RULER's niah_single_1, 2 and 3."""

import functools
import hashlib
import itertools
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from memcomp import errors, limits
from memcomp import progress as progress_lib
from memcomp.data.synthetic import niah, niah_task
from memcomp.evaluation import haystacks, load, plot, report, slices, tasks
from memcomp.inference import complete

CONTEXTS = (1024, 2048, 4096, 8192)
"""Tokens of a question and its answer, as in the papers."""


def run(
  opened: load.Checkpoint,
  folder: pathlib.Path,
  *,
  seed: int = 42,
  contexts: Sequence[int | str] = (),
  needles: Sequence[str] = (),
  samples: int | None = None,
  rows: int = 8,
  essay_file: str = "",
  word_list: str = "",
  sentences: str = "regex",
) -> list[pathlib.Path | str]:
  """Asks a model for needles; prints and writes JSON, PNG and table lines.

  Args:
    opened: the model.
    folder: folder for results; slices with results there are skipped.
    seed: seed of the questions; the default is RULER's.
    contexts: question lengths in tokens; repeated ones are asked once. () is
      `CONTEXTS`; for a model trained on needles, it is one, two, four and eight
      times the trained length.
    needles: names in `niah.NEEDLES`. () is all; for such a model, the trained
      one.
    samples: questions per kind and length. None is 500; for such a model, 100.
    rows: number of parallel questions.
    essay_file: text, or JSON with a "text"; "" is the bundled essay.
    word_list: folder of adjectivelist.txt and nounlist.txt, or "wonderwords"
      for the package's lists; "" is the bundled lists.
    sentences: sentence splitter for essays, "regex" or "punkt" (nltk).

  Returns:
    Paths of the results, or lines about them.

  Raises:
    UserError: a bad value, a missing file, or a length without room for a
      question.
  """
  task = opened.config.data.task
  trained = task if isinstance(task, niah_task.NiahConfig) else None
  if samples is None:
    samples = 100 if trained else 500
  needles = needles or ([trained.needle] if trained else list(niah.NEEDLES))
  lengths = _lengths(contexts, trained)
  _check(needles, samples, sentences)
  material = haystacks.Material(
    haystacks.read_words(word_list),
    haystacks.read_essay(essay_file),
    sentences,
    own_essay=bool(essay_file),
    own_words=bool(word_list),
  )
  results = slices.Slices(folder, "niah", opened)
  print(report.model_label(opened, step=True))
  planned = _fitting(
    [
      describe(name, length, material, opened, samples, seed)
      for name, length in dict.fromkeys(itertools.product(needles, lengths))
    ],
    opened,
    material,
    leave_out=not contexts,
  )
  print(_TITLE)
  every = []
  for task in planned:
    found, state = results.find_or_measure(
      task,
      functools.partial(measure, opened, task, material, rows),
      setting=_setting(task, material),
      result=lambda one: (
        f"loose {one['loose']:.2f}, strict {one['strict']:.2f}"
      ),
    )
    every.append(found)
    print(_line(found, state), flush=True)
  asked = f"{report.counted(samples, 'question')} each"
  title = f"{opened.config.name}, step {opened.step}: {asked}"
  picture = results.path.with_suffix(".png")
  return [
    results.path,
    folder / "results.md",
    plot.needles(every, title, picture),
  ]


def _setting(task: dict[str, Any], material: haystacks.Material) -> str:
  """Returns the setting in the table, which has a line for each."""
  parts = [
    task["task"],
    f"{task['context']:,} tokens",
    f"{task['samples']} samples",
    f"seed {task['seed']}",
  ]
  if "words" in material.deviations(task["haystack"]) and material.own_words:
    parts.append(f"words {task['words'][:6]}")
  if task["essay"] and material.own_essay:
    parts.append(f"essay {task['essay'][:6]}")
  if task["sentences"] == "punkt":
    parts.append("punkt")
  return ", ".join(parts)


def describe(
  name: str,
  length: int,
  material: haystacks.Material,
  opened: load.Checkpoint,
  num_samples: int,
  seed: int,
) -> dict[str, Any]:
  """Returns a slice's description of its task.

  Returns:
    `task`: niah_NAME, with the suffix `-pd` if bundled words or essays replace
      RULER's; `label`: "ruler-exact", or "ruler-like" with `deviations`; and
      `task_hash` with its contents.
  """
  haystack, kind = niah.NEEDLES[name]
  essay = haystack == "essay"
  deviations = material.deviations(haystack)
  stands_in = {"words", "essay"} & set(deviations)
  task = {
    "task": f"niah_{name}{'-pd' if stands_in else ''}",
    "label": "ruler-like" if deviations else "ruler-exact",
    "deviations": deviations,
    "needle": name,
    "haystack": haystack,
    "value": kind,
    "context": length,
    "samples": num_samples,
    "seed": seed,
    "answer_tokens": niah.ANSWER_TOKENS,
    "words": material.keys.fingerprint,
    "essay": _digest(material.essay) if essay else None,
    "sentences": material.sentences if essay else None,
  }
  tokenizer = opened.tokenizer.fingerprint
  return task | {"task_hash": report.task_hash(**task, tokenizer=tokenizer)}


def measure(
  opened: load.Checkpoint,
  task: dict[str, Any],
  material: haystacks.Material,
  rows: int,
) -> dict[str, Any]:
  """Asks the questions of one slice.

  Returns:
    `loose` and `strict`, percent: the answer contains, or begins with, the
    value; `questions_hash`; `state_bytes` of one question after its prompt; for
    each question its `tokens`, `depth`, and whether it is `found` and `begins`;
    the `answers`.
  """
  questions = _questions(task, opened, material)
  progress = progress_lib.Progress(
    f"{task['task']} at {task['context']:,}, questions", task["samples"]
  )
  digest, state_bytes, asked = hashlib.sha256(), 0, []
  for batch in itertools.batched(questions, rows):
    answers, state_bytes = complete.complete(
      opened.model,
      opened.tokenizer,
      [opened.tokenizer.encode(question.prompt) for question in batch],
      tokens=niah.ANSWER_TOKENS,
      rows=rows,
    )
    for question, text in zip(batch, answers, strict=True):
      separator = "\0" if asked else ""
      digest.update((separator + question.prompt + question.answer).encode())
      asked.append((question._replace(prompt=""), text))
    progress.advance(len(batch))
  found = [loose(text, q.answer) for q, text in asked]
  begins = [strict(text, q.answer) for q, text in asked]
  return {
    "loose": round(100 * sum(found) / len(asked), 2),
    "strict": round(100 * sum(begins) / len(asked), 2),
    "questions_hash": digest.hexdigest()[:16],
    "state_bytes": state_bytes,
    "tokens": [q.tokens for q, _ in asked],
    "depth": [q.depth for q, _ in asked],
    "found": found,
    "begins": begins,
    "answers": [text for _, text in asked],
  }


def _questions(
  task: dict[str, Any], opened: load.Checkpoint, material: haystacks.Material
) -> Iterator[niah.Sample]:
  return niah.samples(
    kind=task["value"],
    keys=material.keys,
    haystack=material.haystack(task["haystack"]),
    max_tokens=task["context"],
    count_tokens=lambda text: len(opened.tokenizer.encode(text)),
    num_samples=task["samples"],
    seed=task["seed"],
  )


def _fitting(
  planned: list[dict[str, Any]],
  opened: load.Checkpoint,
  material: haystacks.Material,
  *,
  leave_out: bool,
) -> list[dict[str, Any]]:
  """Returns the tasks whose lengths have room for a question.

  Raises:
    UserError: a task does not fit, unless `leave_out`; or no task fits.
  """
  fitting = []
  for task in planned:
    try:
      next(_questions(task, opened, material))
      fitting.append(task)
    except niah.DoesNotFitError as error:
      line = f"{task['task']} at {task['context']:,} tokens: {error}"
      if not leave_out:
        raise errors.UserError(
          f"{line}; give larger --contexts, or leave it out of --needles"
        ) from error
      print(f"  left out: {line}")
  if not fitting:
    raise errors.UserError("no question fits; give larger --contexts")
  return fitting


def loose(text: str, value: str) -> bool:
  """RULER's score of an answer: it contains the value."""
  return value.lower() in _clean(text).lower()


def strict(text: str, value: str) -> bool:
  """Whether an answer begins with the value."""
  return _clean(text).lower().startswith(value.lower())


def _clean(text: str) -> str:
  return re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip()


def _lengths(
  given: Sequence[int | str], trained: niah_task.NiahConfig | None
) -> list[int]:
  if given:
    return tasks.contexts(given)
  if trained:
    return [trained.context * times for times in (1, 2, 4, 8)]
  return list(CONTEXTS)


def _check(needles: Sequence[str], samples: int, sentences: str) -> None:
  for flag, values, known in (
    ("needles", needles, niah.NEEDLES),
    ("sentences", [sentences], haystacks.SPLITTERS),
  ):
    if any(value not in known for value in values):
      raise errors.UserError(
        f"--{flag}={','.join(values)}: give {' or '.join(known)}"
      )
  limits.check("--samples", samples, 1, limits.SIDE_BY_SIDE)
  haystacks.SPLITTERS[sentences]()


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]


_TITLE = f"  {'task':<18} {'tokens':>9} {'loose':>7} {'strict':>7}  state, KiB"


def _line(found: dict[str, Any], state: str) -> str:
  return (
    f"  {found['task']:<18} {found['context']:>9,} {found['loose']:>7.2f}"
    f" {found['strict']:>7.2f} {found['state_bytes'] / 1024:>11,.1f}  {state}"
  ).rstrip()
