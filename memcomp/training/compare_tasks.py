"""Compares runs on a synthetic task: accuracy and state size."""

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from memcomp import errors, figures, paths
from memcomp.data.synthetic import task as task_lib
from memcomp.runs import workdir


class _Fields(NamedTuple):
  """Fields of a slice in a result: its name, its questions, their number."""

  name: tuple[str, ...]
  questions: str
  count: str


_SLICE = {
  "recall": _Fields(("gap",), "rows_hash", "samples"),
  "mqar": _Fields(("length", "pairs"), "rows_hash", "examples"),
  "niah": _Fields(("needle", "context"), "questions_hash", "samples"),
}


class _Answers(NamedTuple):
  """How a run answered one set of questions."""

  accuracy: float
  count: int


_Slice = dict[str, _Answers]
"""Answers of a run to one slice, by the hash of the questions."""

Folders = dict[tuple[str, int], pathlib.Path]
"""Folders of runs by name and seed."""


def compare(folder: pathlib.Path) -> dict[str, Any] | None:
  """Reads the finished runs in a folder, as `train.py --each` leaves them.

  Returns:
    None without runs of a task. `slices`, the names of all; `rows`, by name:
    `name`, `seeds`, `state_bytes` at the trained length, and by slice
    `accuracy` and its deviation over seeds `accuracy_std`, None for missing
    slices; and `notes`, lines for the reader, if there are any.

  Raises:
    UserError: their tasks differ in more than the gap, or see `check_new` and
      `check_seeds`.
  """
  runs: dict[str, list[dict[str, Any]]] = {}
  places: Folders = {}
  others = set()
  for path in sorted(folder.glob("*/eval/results.json")):
    result = paths.read_json(path, "evaluate the run again")
    if "task" not in result:
      others.add(path.parent.parent.name)
    else:
      with errors.malformed(f"{path.parent}", "evaluate the run again"):
        slices = _slices(path.parent, result)
        result |= {
          "slices": slices,
          "seed": int(result["seed"]),
          "state_bytes": int(result["state_bytes"]),
          "trained on": _task(result),
        }
        check_new(result, path.parent.parent, places)
        runs.setdefault(result["name"], []).append(result)
  if not runs:
    return None
  every = [one for of in runs.values() for one in of]
  _check_same(every)
  for of in runs.values():
    check_seeds(of, ("model", "training", "optimizer"))
  names = sorted({x for one in every for x in one["slices"]})
  if not names:
    raise errors.UserError(
      f"{folder}: the runs have no slices in their eval folders; evaluate them"
      " again"
    )
  notes = _choose(every, names)
  rows = []
  for name, of in runs.items():
    have = [
      [one["chosen"][x] for one in of if x in one["chosen"]] for x in names
    ]
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
  if others:
    notes.append(
      f"left out, since they were trained on text: {', '.join(sorted(others))}"
    )
  found = {"slices": [_label(x) for x in names], "rows": rows}
  return found | ({"notes": notes} if notes else {})


def check_new(
  run: dict[str, Any], folder: pathlib.Path, places: Folders
) -> None:
  """Records the folder of a run, and refuses a second of its name and seed.

  A copy would count as another seed and make the deviation too small.

  Raises:
    UserError: another folder holds a run of its name and seed.
  """
  other = places.setdefault((run["name"], run["seed"]), folder)
  if other != folder:
    raise errors.UserError(
      f"{other} and {folder} both hold {run['name']} of seed {run['seed']};"
      " move one of them away, or train it with another seed"
    )


def check_seeds(runs: list[dict[str, Any]], parts: Sequence[str]) -> None:
  """Checks that runs of one name are seeds of one model.

  Without this the mean and the deviation would mix two models.

  Args:
    runs: the results of runs of one name.
    parts: parts of their configs that must agree, such as "model". Fields that
      results do not depend on may differ, and so may names of mixers.

  Raises:
    UserError: naming each field in which a run differs from the first.
  """
  first, *others = runs
  like = None
  # A config that this version cannot read is compared as it was saved.
  with contextlib.suppress(errors.UserError):
    like = workdir.config_of(first["config"], first["name"])
  mine = workdir.of_this_version(first["config"], like=like)
  for run in others:
    theirs = workdir.of_this_version(run["config"], like=like)
    changed = [
      line
      for part in parts
      for line in workdir.differences(
        mine.get(part), theirs.get(part), part, "{} is {!r} and {!r}"
      )
      if not workdir.is_free(line.split(" ", 1)[0])
    ]
    if changed:
      raise errors.UserError(
        f"{run['name']} of seeds {first['seed']} and {run['seed']} differ:"
        f" {'; '.join(changed)}; runs of one name are seeds of one model, so"
        " move one away, or train it with another --config.name"
      )


def table(found: dict[str, Any]) -> str:
  """Returns the result of `compare` as a Markdown table."""
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
  """Draws accuracy by slice, and of the last slice against the state size.

  Args:
    found: result of `compare`.
    path: path of the PNG.

  Returns:
    `path`, or a line that explains why there is no figure.
  """
  canvas = figures.new_canvas(11, 4.5 + 0.06 * len(found["rows"]))
  if canvas is None:
    return figures.MISSING.format(path.name)
  by_slice, by_state = canvas.subplots(1, 2, sharey=True)
  places = range(len(found["slices"]))
  for number, row in enumerate(found["rows"]):
    mean = [np.nan if x is None else x for x in row["accuracy"]]
    std = [x or 0 for x in row["accuracy_std"]]
    # If there are more models than colours, use another marker.
    style = {
      "marker": "os^Dv"[number // 10 % 5],
      "color": f"C{number % 10}",
      "markersize": 5,
      "capsize": 3,
    }
    by_slice.errorbar(places, mean, yerr=std, label=row["name"], **style)
    by_state.errorbar(row["state_bytes"], mean[-1], yerr=std[-1], **style)
    by_state.annotate(
      row["name"],
      (row["state_bytes"], mean[-1]),
      xytext=(5, 4),
      textcoords="offset points",
      fontsize="x-small",
    )
  by_slice.set_xticks(places, found["slices"], fontsize="small")
  by_slice.set(
    xlabel="slice (bars: std over seeds)", ylabel="accuracy", ylim=(-0.03, 1.05)
  )
  by_state.set_xscale("log", base=2)
  by_state.set(
    xlabel="state, bytes a sequence", title=f"slice {found['slices'][-1]}"
  )
  for axes in (by_slice, by_state):
    axes.grid(alpha=0.3)
  canvas.legend(loc="outside lower center", fontsize="small", ncols=5)
  return figures.save(canvas, path)


def _check_same(runs: list[dict[str, Any]]) -> None:
  first = runs[0]
  for run in runs:
    if run["trained on"] != first["trained on"]:
      raise errors.UserError(
        f"{run['name']} and {first['name']} were trained on other tasks"
        f" ({run['trained on']} and {first['trained on']}); compare runs of one"
        " task"
      )


def _task(run: dict[str, Any]) -> dict[str, Any]:
  """Returns the task of a run without the gap."""
  saved = run["config"]["data"]["task"]
  own = workdir.of_this_version(saved, task_lib.TaskConfig)
  of = {"task": run["task"], **own}
  return {name: of[name] for name in of if name != "gap"}


def _slices(
  folder: pathlib.Path, result: dict[str, Any]
) -> dict[tuple[Any, ...], _Slice]:
  """Returns all answers of one run, by slice."""
  slices: dict[tuple[Any, ...], _Slice] = {}
  fields = _SLICE[result["task"]]
  files = f"{result['task']}*-step{result['step']}.json"
  for path in sorted(folder.glob(files)):
    found = paths.read_json(path, "evaluate the run again")
    for one in found["slices"]:
      # Needles are scored in percent, as in RULER.
      right = one["accuracy"] if "accuracy" in one else one["loose"] / 100
      answers = _Answers(float(right), int(one[fields.count]))
      name = tuple(one[x] for x in fields.name)
      slices.setdefault(name, {})[str(one[fields.questions])] = answers
  return slices


def _choose(
  runs: list[dict[str, Any]], names: list[tuple[Any, ...]]
) -> list[str]:
  """Sets `chosen` of each run: its accuracy by slice, on one set of questions.

  These are the questions that all runs with the slice have answered, where
  there are such; else each run's largest set.

  Returns:
    Notes on the slices that have answers to several sets.
  """
  differ, passed = [], []
  for run in runs:
    run["chosen"] = {}
  for name in names:
    having = [run for run in runs if name in run["slices"]]
    sets = [run["slices"][name] for run in having]
    shared = [x for x in sets[0] if all(x in found for found in sets)]
    taken = set()
    for run, found in zip(having, sets, strict=True):
      # The first of equally many rows.
      best = max(shared or found, key=lambda x: found[x].count)
      taken.add(best)
      run["chosen"][name] = found[best].accuracy
    if len(taken) > 1:
      differ.append(_label(name))
    if any(len(found) > 1 for found in sets):
      passed.append(_label(name))
  notes = []
  if differ:
    notes.append(
      f"the runs have answered different questions in {', '.join(differ)};"
      " evaluate them again with the same flags and --seed (questions of niah"
      " also follow the tokenizer)"
    )
  if passed:
    notes.append(
      f"some runs have answered several sets of questions in"
      f" {', '.join(passed)}: what counts is the set that all have answered, or"
      " else a run's largest"
    )
  return notes


def _label(name: tuple[Any, ...]) -> str:
  return "/".join(map(str, name))
