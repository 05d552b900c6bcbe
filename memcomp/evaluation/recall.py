"""Recall over gaps, on a checkpoint that was trained on one gap.

Rows of the trained task with other gaps show accuracy, nats and calibration
beyond the trained gap.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from memcomp import limits
from memcomp import progress as progress_lib
from memcomp.data import store as store_lib
from memcomp.data.synthetic import recall
from memcomp.evaluation import answers, load, panels, report, slices
from memcomp.models import overview

GAPS = (12, 24, 36, 48, 64, 96, 128, 192)
LONG_GAPS = (128, 256, 512, 1024)
"""Gaps for rows of one episode."""

_TITLE = (
  "     gap  tokens  accuracy      (error)  nats per answer  calibration error"
  "  state bytes"
)


def run(
  opened: load.Checkpoint,
  folder: pathlib.Path,
  *,
  seed: int = 0,
  gaps: Sequence[int | str] = (),
  samples: int = 256,
) -> list[pathlib.Path | str]:
  """Measures every gap; prints and writes JSON, PNG and table lines.

  Args:
    opened: a model trained on the task recall.
    folder: folder for results; slices with results there are skipped.
    seed: seed of the rows, which training never draws.
    gaps: gaps to measure; () is the trained one and `GAPS`, or `LONG_GAPS` for
      rows of one episode.
    samples: rows per gap.

  Returns:
    Paths of the results, or lines about them.

  Raises:
    UserError: the model was trained on something else, or a value is bad.
  """
  task = answers.task_of(opened, recall.RecallConfig.name)
  assert isinstance(task, recall.RecallConfig)
  limits.check("--samples", samples, 1, limits.SIDE_BY_SIDE)
  tasks = [dataclasses.replace(task, gap=gap) for gap in _gaps(gaps, task)]
  results = slices.Slices(folder, "recall", opened)
  progress = progress_lib.Progress("answering, rows", samples * len(tasks))
  print(report.model_label(opened, step=True))
  print(f"{_about(task)}, {report.counted(samples, 'row')} each\n{_TITLE}")
  found = []
  for own in tasks:
    key = describe(own, task, samples, seed)
    one, state = results.find_or_measure(
      key,
      functools.partial(measure, opened, own, samples, seed, progress),
      setting=f"gap {own.gap}, {_about(task)}, {samples} rows, seed {seed}",
      result=lambda one: (
        f"accuracy {one['accuracy']:.4f}, {one['nats']:.4f} nats,"
        f" calibration error {one['calibration_error']:.4f}"
      ),
    )
    if state:
      progress.advance(samples)
    found.append(one)
    print(_line(one, state), flush=True)
  return [
    results.path,
    folder / "results.md",
    _draw(found, task, opened, results.path.with_suffix(".png")),
  ]


def describe(
  own: recall.RecallConfig,
  trained: recall.RecallConfig,
  samples: int,
  seed: int,
) -> dict[str, Any]:
  """Returns a slice's description of its task, with a hash of it."""
  task = {
    "task": own.name,
    **dataclasses.asdict(own),
    "trained_gap": trained.gap,
    "samples": samples,
    "seed": seed,
  }
  return task | {"task_hash": report.task_hash(**task)}


def measure(
  opened: load.Checkpoint,
  own: recall.RecallConfig,
  samples: int,
  seed: int,
  progress: progress_lib.Progress,
) -> dict[str, Any]:
  """Answers the rows of one gap.

  Returns:
    The figures of `answers.summary`, accuracy `by_episode`, `tokens` per row,
    `chance`, `state_bytes` at the end of a row, and `rows_hash`.
  """
  rows = own.rows("test", seed=seed, batch_size=1, length=0)
  tokens, targets = answers.take(rows, samples)
  found = answers.measure(opened.model, tokens, targets, progress.advance)
  length = tokens.shape[1]
  return {
    "rows_hash": store_lib.digest(tokens, targets),
    "tokens": length,
    "chance": 1 / own.symbols,
    **answers.summary(found),
    "by_episode": [float(x) for x in found.right.mean(axis=0)],
    "state_bytes": overview.state_bytes(opened.config.model, length),
  }


def _gaps(given: Sequence[int | str], task: recall.RecallConfig) -> list[int]:
  chosen = limits.whole_numbers("--gaps", given, 0)
  default = GAPS if task.episodes > 1 else LONG_GAPS
  return sorted(set(chosen) or {*default, task.gap})


def _about(task: recall.RecallConfig) -> str:
  pairs = f", {task.pairs} pairs each" if task.pairs > 1 else ""
  return f"{task.episodes} episode(s){pairs}, trained at gap {task.gap}"


def _line(one: dict[str, Any], state: str) -> str:
  return (
    f"  {one['gap']:>6}  {one['tokens']:>6,}  {answers.accuracy(one)}"
    f"  {one['nats']:>14.4f}"
    f"  {one['calibration_error']:>17.4f}  {one['state_bytes']:>11,}  {state}"
  ).rstrip()


def _draw(
  found: list[dict[str, Any]],
  task: recall.RecallConfig,
  opened: load.Checkpoint,
  path: pathlib.Path,
) -> pathlib.Path | str:
  def column(name):
    return [one[name] for one in found]

  return panels.draw(
    [max(1, gap) for gap in column("gap")],
    [
      panels.Panel(
        "accuracy",
        {"model": column("accuracy"), "chance": column("chance")},
        (-0.03, 1.03),
        {"model": column("accuracy_error")},
      ),
      panels.Panel("nats per answer", {"model": column("nats")}, (0, None)),
      panels.Panel("calibration error", {"model": column("calibration_error")}),
    ],
    xlabel="gap (tokens, log scale)",
    title=f"{opened.config.name}, step {opened.step}: recall over gaps",
    path=path,
    names=[str(gap) for gap in column("gap")],
    mark=(task.gap, f"trained gap {task.gap}"),
  )
