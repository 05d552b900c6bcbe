"""Runs that were trained on a task, side by side: accuracy by slice."""

import json
import pathlib
from typing import Any

import numpy as np

from memcomp import errors
from memcomp.evaluation import panels

_SLICE = {"recall": ("gap",), "mqar": ("length", "pairs")}
"""Fields that tell the slices of a task apart."""


def compare(folder: pathlib.Path) -> dict[str, Any] | None:
  """Reads the finished runs in a folder, as `train.py --each` leaves them.

  Returns:
    None if there is none of a task. `slices`, the names of all; `rows`, by
    name: `name`, `seeds`, `state_bytes` at the trained length, and by slice
    `accuracy` and its deviation over seeds `accuracy_std`, None where a run
    has no such slice.

  Raises:
    UserError: they were trained on tasks that differ in more than the gap.
  """
  runs: dict[str, list[dict[str, Any]]] = {}
  for path in sorted(folder.glob("*/eval/results.json")):
    result = json.loads(path.read_text())
    if "task" in result:
      slices = _slices(path.parent, result)
      runs.setdefault(result["name"], []).append(result | {"slices": slices})
  if not runs:
    return None
  every = [one for of in runs.values() for one in of]
  _check_same(every)
  names = sorted({x for one in every for x in one["slices"]})
  rows = []
  for name, of in runs.items():
    found = [[one["slices"].get(x) for one in of] for x in names]
    have = [[x for x in column if x is not None] for column in found]
    rows.append(
      {
        "name": name,
        "seeds": sorted(one["seed"] for one in of),
        "state_bytes": of[0]["state_bytes"],
        "accuracy": [float(np.mean(x)) if x else None for x in have],
        "accuracy_std": [
          float(np.std(x, ddof=1)) if len(x) > 1 else None for x in have
        ],
      }
    )
  return {"slices": ["/".join(map(str, x)) for x in names], "rows": rows}


def table(found: dict[str, Any]) -> str:
  """Returns `compare`'s result as a table in markdown."""
  lines = [
    "| model | seeds | state bytes | " + " | ".join(found["slices"]) + " |",
    "|---" * (3 + len(found["slices"])) + "|",
  ]
  for row in found["rows"]:
    cells = [
      "" if mean is None else f"{mean:.3f}" + (f" ± {std:.3f}" if std else "")
      for mean, std in zip(row["accuracy"], row["accuracy_std"], strict=True)
    ]
    head = f"{row['name']} | {len(row['seeds'])} | {row['state_bytes']:,}"
    lines.append(f"| {head} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], path: pathlib.Path) -> pathlib.Path | str:
  """Draws accuracy by slice, a line for each model."""
  return panels.draw(
    range(len(found["slices"])),
    [
      panels.Panel(
        "accuracy",
        {
          row["name"]: [np.nan if x is None else x for x in row["accuracy"]]
          for row in found["rows"]
        },
        (-0.03, 1.03),
        {
          row["name"]: [x or 0 for x in row["accuracy_std"]]
          for row in found["rows"]
        },
      )
    ],
    xlabel="slice (bars: std over seeds)",
    title="accuracy by slice",
    path=path,
    names=found["slices"],
    log=False,
  )


def _check_same(runs: list[dict[str, Any]]) -> None:
  def task(run):
    of = {"task": run["task"], **run["config"]["data"]["task"]}
    return {name: of[name] for name in of if name != "gap"}

  for run in runs:
    if task(run) != task(runs[0]):
      raise errors.UserError(
        f"{run['name']} and {runs[0]['name']} were trained on other tasks"
        f" ({task(run)} and {task(runs[0])}); compare runs of one task"
      )


def _slices(
  folder: pathlib.Path, result: dict[str, Any]
) -> dict[tuple[int, ...], float]:
  """Accuracy by slice of one run; of several seeds the first's."""
  accuracy: dict[tuple[int, ...], float] = {}
  fields = _SLICE[result["task"]]
  files = f"{result['task']}*-step{result['step']}.json"
  for path in sorted(folder.glob(files)):
    for one in json.loads(path.read_text())["slices"]:
      accuracy.setdefault(tuple(one[x] for x in fields), one["accuracy"])
  return accuracy
