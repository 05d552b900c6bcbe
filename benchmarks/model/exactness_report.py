"""The tables and the figure of `exactness.py`."""

import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np

Run = dict[str, Any]

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def read(path: pathlib.Path) -> list[Run]:
  """Returns the finished runs; none without the file."""
  if not path.exists():
    return []
  return [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines()]


def tables(runs: list[Run], gradients: list[str]) -> str:
  """What each run scored and what its gradients were like, in markdown.

  A difference is the mean over the seeds that both have of what a seed scored
  under these gradients less what it scored under the first, with the standard
  error of that mean.
  """
  base, parts = gradients[0], []
  for task, measures in _measures(runs).items():
    lines = [
      f"| memory | {task} | gradients at | by seed | mean | sd | less {base} |",
      "|---" * 7 + "|",
    ]
    for memory in _memories(runs, task):
      for (label, of), name in itertools.product(measures.items(), gradients):
        found, reference = (
          {
            seed: of(run)
            for seed, run in sorted(_by_seed(runs, task, memory, x).items())
          }
          for x in (name, base)
        )
        values = list(found.values())
        if not values:
          continue
        cells = [
          memory,
          label,
          name,
          ", ".join(f"{x:.3f}" for x in values),
          f"{np.mean(values):.3f}",
          f"{np.std(values, ddof=1):.3f}" if len(values) > 1 else "",
          "" if name == base else difference(found, reference),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    parts.append("\n".join(lines) + "\n")
    parts.append(_gradient_table(runs, task, gradients))
  return "\n".join(parts)


def _gradient_table(runs: list[Run], task: str, gradients: list[str]) -> str:
  lines = [
    "| memory | gradients at | largest norm, by seed | median | over 10 |"
    " seconds a run |",
    "|---" * 6 + "|",
  ]
  for memory, name in itertools.product(_memories(runs, task), gradients):
    found = _by_seed(runs, task, memory, name)
    rows = [run for _, run in sorted(found.items())]
    if not rows:
      continue
    cells = [
      memory,
      name,
      ", ".join(f"{run['gradient_max']:.3g}" for run in rows),
      f"{np.median([run['gradient_median'] for run in rows]):.2f}",
      str(sum(run["gradient_over_10"] for run in rows)),
      f"{np.mean([run['seconds'] for run in rows]):.0f}",
    ]
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines) + "\n"


def draw(runs: list[Run], gradients: list[str], path: str) -> None:
  """Loss curves of both tasks and accuracy of recall, a row per memory."""
  try:
    from matplotlib import figure
  except ImportError:
    print(
      "no figure: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
    return
  memories = _memories(runs, "text") or _memories(runs, "recall")
  if not memories:
    return
  canvas = figure.Figure(
    figsize=(12, 1 + 3.2 * len(memories)), layout="constrained"
  )
  grid = canvas.subplots(len(memories), 3, squeeze=False)
  for (text, loss, recall), memory in zip(grid, memories, strict=True):
    for color, name in zip(_COLORS, gradients, strict=False):
      _curve(text, _by_seed(runs, "text", memory, name), name, color)
      found = _by_seed(runs, "recall", memory, name)
      _curve(loss, found, name, color)
      _accuracy(recall, found, name, color)
    text.set(title=f"{memory}: text", ylabel="training loss, bits per byte")
    text.set(xlabel="update", ylim=(2.4, 4.6))
    loss.set(title=f"{memory}: recall", ylabel="training loss, bits per answer")
    loss.set(xlabel="update", ylim=(0, None))
    recall.set(title=f"{memory}: recall", ylabel="accuracy")
    recall.set(xlabel="key-value pairs in a row", ylim=(0, 1.03))
    for axes in (text, loss, recall):
      axes.grid(alpha=0.3)
      if axes.has_data():
        axes.legend(fontsize="small")
  canvas.savefig(path, dpi=100)


def _curve(axes, found: dict[int, Run], name: str, color: str) -> None:
  """Mean loss over seeds; shaded from the lowest seed to the highest."""
  if not found:
    return
  curves = np.array([run["curve"] for run in found.values()])
  width = next(iter(found.values()))["curve_width"]
  updates = width * (np.arange(curves.shape[1]) + 0.5)
  axes.plot(updates, curves.mean(0), color=color, label=name)
  axes.fill_between(
    updates, curves.min(0), curves.max(0), color=color, alpha=0.2, lw=0
  )


def _accuracy(axes, found: dict[int, Run], name: str, color: str) -> None:
  """Accuracy by pairs: a line through the means, a point a seed."""
  if not found:
    return
  pairs = list(next(iter(found.values()))["accuracy"])
  values = np.array([list(run["accuracy"].values()) for run in found.values()])
  places = range(len(pairs))
  axes.plot(places, values.mean(0), color=color, label=name)
  for row in values:
    axes.plot(places, row, "o", ms=4, alpha=0.6, color=color)
  axes.set_xticks(places, pairs)


def _measures(runs: list[Run]):
  """What each task is judged by: name and function of a run."""

  def accuracy(pairs):
    return lambda run: run["accuracy"][pairs]

  found: dict[str, dict[str, Any]] = {}
  for run in runs:
    if run["task"] == "text":
      found["text"] = {"bits per byte": lambda run: run["bits_per_byte"]}
    else:
      found["recall"] = {f"{n} pairs": accuracy(n) for n in run["accuracy"]}
  return found


def _memories(runs: list[Run], task: str) -> list[str]:
  found = dict.fromkeys(run["memory"] for run in runs if run["task"] == task)
  return sorted(found, reverse=True)  # Trellis first, as everywhere


def _by_seed(
  runs: list[Run], task: str, memory: str, gradients: str
) -> dict[int, Run]:
  named = {"task": task, "memory": memory, "gradients": gradients}
  return {run["seed"]: run for run in runs if named.items() <= run.items()}


def difference(found: dict[int, float], reference: dict[int, float]) -> str:
  """The mean difference over the seeds that both have, with its error."""
  seeds = sorted(found.keys() & reference.keys())
  pairs = np.array([found[seed] - reference[seed] for seed in seeds])
  if len(pairs) < 2:
    return "".join(f"{x:+.3f}" for x in pairs)
  error = pairs.std(ddof=1) / math.sqrt(len(pairs))
  return f"{pairs.mean():+.3f} +- {error:.3f}"
