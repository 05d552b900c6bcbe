"""MQAR on a checkpoint: accuracy by length and number of pairs."""

import dataclasses
import functools
import pathlib
from typing import Any

from memcomp import errors
from memcomp import progress as progress_lib
from memcomp.data import store as store_lib
from memcomp.data.synthetic import mqar_task
from memcomp.evaluation import answers, load, panels, report, slices
from memcomp.models import overview

_TITLE = (
  "  tokens  pairs    rows  accuracy      (error)  nats per answer"
  "  state floats a layer"
)


def run(
  opened: load.Checkpoint,
  folder: pathlib.Path,
  *,
  seed: int | None = None,
  segments: str = "",
) -> list[pathlib.Path | str]:
  """Measures every slice; prints and writes JSON, PNG and table lines.

  Args:
    opened: a model trained on the task mqar.
    folder: folder for results; slices with results there are skipped.
    seed: base seed of the segments; None is training's, whose test rows differ
      from its training rows.
    segments: LENGTH:PAIRS:ROWS, joined by ";"; "" is the task's `test`.

  Returns:
    Paths of the results, or lines about them.

  Raises:
    UserError: the model was trained on something else, or a value is bad.
  """
  task = answers.task_of(opened, mqar_task.MqarConfig.name)
  assert isinstance(task, mqar_task.MqarConfig)
  task = _with_segments(task, segments)
  if seed is None:
    seed = opened.config.data.seed
  chosen = task.segments("test")
  results = slices.Slices(folder, task.label, opened)
  total = sum(segment.examples for segment in chosen)
  progress = progress_lib.Progress("answering, rows", total)
  print(report.model_label(opened, step=True))
  print(f"{task.label}, vocabulary {task.vocab_size:,}\n{_TITLE}")
  found = []
  for number, segment in enumerate(chosen):
    key = describe(task, number, seed)
    one, state = results.find_or_measure(
      key,
      functools.partial(measure, opened, task, number, seed, progress),
      setting=f"{segment.length} tokens, {segment.pairs} pairs,"
      f" {segment.examples} rows, vocabulary {task.vocab_size}, seed {seed}",
      result=lambda one: f"accuracy {one['accuracy']:.4f}",
    )
    if state:
      progress.advance(segment.examples)
    found.append(one)
    print(_line(one, state), flush=True)
  return [
    results.path,
    folder / "results.md",
    _draw(found, task, opened, results.path.with_suffix(".png")),
  ]


def describe(
  task: mqar_task.MqarConfig, number: int, seed: int
) -> dict[str, Any]:
  """Returns a slice's description of its task, with a hash of it."""
  segment = task.segments("test")[number]
  about = {
    "task": task.label,
    **segment._asdict(),
    "vocab_size": task.vocab_size,
    "mode": task.mode,
    "power": task.power,
    "random_filler": task.random_filler,
    "seed": seed,
    "segment_seed": task.seeds("test", seed)[number],
  }
  return about | {"task_hash": report.task_hash(**about)}


def measure(
  opened: load.Checkpoint,
  task: mqar_task.MqarConfig,
  number: int,
  seed: int,
  progress: progress_lib.Progress,
) -> dict[str, Any]:
  """Answers the rows of one slice.

  Returns:
    The figures of `answers.summary`, `state_floats` of the largest layer's
    memory and `state_bytes` of all memories at the end of a row, and
    `rows_hash`.
  """
  tokens, targets = task.examples("test", number, seed)
  found = answers.measure(opened.model, tokens, targets, progress.advance)
  model, length = opened.config.model, tokens.shape[1]
  return {
    "rows_hash": store_lib.digest(tokens, targets),
    **answers.summary(found),
    "state_floats": max(x.state_floats(length) for x in model.layer_mixers()),
    "state_bytes": overview.state_bytes(model, length),
  }


def _with_segments(
  task: mqar_task.MqarConfig, segments: str
) -> mqar_task.MqarConfig:
  if not segments:
    return task
  task = dataclasses.replace(task, test=segments)
  try:
    task.validate()
  except ValueError as error:
    raise errors.UserError(f"--segments: {error}") from error
  return task


def _line(one: dict[str, Any], state: str) -> str:
  return (
    f"  {one['length']:>6,}  {one['pairs']:>5}  {one['examples']:>6,}"
    f"  {one['accuracy']:>8.4f}  (+-{one['accuracy_error']:>8.4f})"
    f"  {one['nats']:>14.4f}  {one['state_floats']:>20,}  {state}"
  ).rstrip()


def _draw(
  found: list[dict[str, Any]],
  task: mqar_task.MqarConfig,
  opened: load.Checkpoint,
  path: pathlib.Path,
) -> pathlib.Path | str:
  found = sorted(found, key=lambda one: (one["length"], one["pairs"]))
  return panels.draw(
    range(len(found)),
    [
      panels.Panel(
        "accuracy",
        {"model": [one["accuracy"] for one in found]},
        (-0.03, 1.03),
        {"model": [one["accuracy_error"] for one in found]},
      ),
      panels.Panel(
        "floats of state, a layer",
        {"": [one["state_floats"] for one in found]},
        log=True,
      ),
    ],
    xlabel="slice: tokens / pairs",
    title=f"{opened.config.name}, step {opened.step}: {task.label}",
    path=path,
    names=[f"{one['length']}/{one['pairs']}" for one in found],
    log=False,
  )
