"""MQAR on a checkpoint: accuracy by length and number of pairs."""

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
    segments: LENGTH:PAIRS:ROWS, joined by ";", each asked once; "" is the
      task's `test`. Those of `test` have its rows, wherever they stand.

  Returns:
    Paths of the results, or lines about them.

  Raises:
    UserError: the model was trained on something else, or a value is bad.
  """
  task = answers.task_of(opened, mqar_task.MqarConfig.name)
  assert isinstance(task, mqar_task.MqarConfig)
  if seed is None:
    seed = opened.config.data.seed
  chosen = _chosen(task, segments, seed)
  results = slices.Slices(folder, task.label, opened)
  total = sum(segment.examples for segment, _ in chosen)
  progress = progress_lib.Progress("answering, rows", total)
  print(report.model_label(opened, step=True))
  print(f"{task.label}, vocabulary {task.vocab_size:,}\n{_TITLE}")
  found = []
  for segment, segment_seed in chosen:
    key = describe(task, segment, segment_seed, seed)
    one, state = results.find_or_measure(
      key,
      functools.partial(measure, opened, task, segment, segment_seed, progress),
      setting=_setting(task, segment, segment_seed, seed),
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
  task: mqar_task.MqarConfig,
  segment: mqar_task.Segment,
  segment_seed: int,
  seed: int,
) -> dict[str, Any]:
  """Returns a slice's description of its task, with a hash of it."""
  about = {
    "task": task.label,
    **segment._asdict(),
    "vocab_size": task.vocab_size,
    "mode": task.mode,
    "power": task.power,
    "random_filler": task.random_filler,
    "seed": seed,
    "segment_seed": segment_seed,
  }
  return about | {"task_hash": report.task_hash(**about)}


def measure(
  opened: load.Checkpoint,
  task: mqar_task.MqarConfig,
  segment: mqar_task.Segment,
  segment_seed: int,
  progress: progress_lib.Progress,
) -> dict[str, Any]:
  """Answers the rows of one slice.

  Returns:
    The figures of `answers.summary`, `state_floats` of the largest layer's
    memory and `state_bytes` of all memories at the end of a row, and
    `rows_hash`.
  """
  tokens, targets = task.draw(segment, segment_seed)
  found = answers.measure(opened.model, tokens, targets, progress.advance)
  model, length = opened.config.model, tokens.shape[1]
  return {
    "rows_hash": store_lib.digest(tokens, targets),
    **answers.summary(found),
    "state_floats": max(x.state_floats(length) for x in model.layer_mixers()),
    "state_bytes": overview.state_bytes(model, length),
  }


def _chosen(
  task: mqar_task.MqarConfig, segments: str, seed: int
) -> list[tuple[mqar_task.Segment, int]]:
  """Returns the segments to ask, each with its seed."""
  if not segments:
    return list(
      zip(task.segments("test"), task.seeds("test", seed), strict=True)
    )
  try:
    given = task.checked(segments, "--segments")
  except ValueError as error:
    raise errors.UserError(str(error)) from error
  return [(one, task.test_seed(one, seed)) for one in dict.fromkeys(given)]


def _setting(
  task: mqar_task.MqarConfig,
  segment: mqar_task.Segment,
  segment_seed: int,
  seed: int,
) -> str:
  """Returns the setting in the table, which has a line for each."""
  setting = (
    f"{segment.length} tokens, {segment.pairs} pairs, {segment.examples} rows,"
    f" vocabulary {task.vocab_size}, seed {seed}"
  )
  own = segment in task.segments("test")
  if own and segment_seed == task.test_seed(segment, seed):
    return setting
  return f"{setting}, segment seed {segment_seed}"


def _line(one: dict[str, Any], state: str) -> str:
  return (
    f"  {one['length']:>6,}  {one['pairs']:>5}  {one['examples']:>6,}"
    f"  {answers.accuracy(one)}"
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
