"""The table and the figure of `stability.py`."""

import json
import math
import pathlib
from typing import Any

import numpy as np

Run = dict[str, Any]


def read(path: pathlib.Path, steps: int) -> list[Run]:
  """Returns the finished runs of so many steps; none without the file."""
  if not path.exists():
    return []
  lines = path.read_text(encoding="utf-8").splitlines()
  runs = [json.loads(line) for line in lines]
  return [run for run in runs if run["steps"] == steps]


def table(runs: list[Run], variants: list[str], base: str) -> str:
  """A row per variant, in markdown.

  A difference, to the base or to the same variant with stale gradients, is the
  mean over the seeds that both have, with the standard error of that mean.
  """
  reference = _by_seed(runs, base)
  lines = [
    "| variant | seeds | bits per byte | sd | less base | less stale |"
    " largest gradient | median | over 10 | skipped |",
    "|---" * 10 + "|",
  ]
  for variant in variants:
    found = _by_seed(runs, variant)
    if not found:
      continue
    values = [run["bits_per_byte"] for run in found.values()]
    stale = {}
    if not variant.startswith("stale"):
      stale = _by_seed(runs, variant.replace("token", "stale", 1))
    rows = list(found.values())
    cells = [
      variant,
      str(len(found)),
      f"{np.mean(values):.3f}",
      f"{np.std(values, ddof=1):.3f}" if len(values) > 1 else "",
      "" if variant == base else _difference(found, reference),
      _difference(found, stale),
      f"{max(run['gradient_max'] for run in rows):.2g}",
      f"{np.median([run['gradient_median'] for run in rows]):.2g}",
      str(sum(run["gradient_over_10"] for run in rows)),
      str(sum(run["skipped"] for run in rows)),
    ]
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines)


def _by_seed(runs: list[Run], variant: str) -> dict[int, Run]:
  return {run["seed"]: run for run in runs if run["variant"] == variant}


def _difference(found: dict[int, Run], reference: dict[int, Run]) -> str:
  both = found.keys() & reference.keys()
  pairs = np.array(
    [found[s]["bits_per_byte"] - reference[s]["bits_per_byte"] for s in both]
  )
  if not len(pairs):
    return ""
  if len(pairs) == 1:
    return f"{pairs[0]:+.3f}"
  error = pairs.std(ddof=1) / math.sqrt(len(pairs))
  return f"{pairs.mean():+.3f} +- {error:.3f}"


def draw(runs: list[Run], variants: list[str], path: str) -> None:
  """Bits per byte and gradient norms of every seed; orange is stale."""
  try:
    from matplotlib import figure
  except ImportError:
    print(
      "no figure: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
    return
  names = [name for name in variants if _by_seed(runs, name)]
  canvas = figure.Figure(
    figsize=(9, 1 + 0.26 * len(names)), layout="constrained"
  )
  left, right = canvas.subplots(1, 2, sharey=True)
  for place, name in enumerate(names):
    rows = list(_by_seed(runs, name).values())
    colour = "tab:orange" if name.startswith("stale") else "tab:blue"

    def dots(axes, field, rows=rows, place=place, **style):
      values = [run[field] for run in rows]
      axes.plot(values, [place] * len(values), "o", ms=4, **style)
      return values

    bits = dots(left, "bits_per_byte", color=colour, alpha=0.5)
    left.plot([np.mean(bits)], [place], "|", ms=14, color="black")
    dots(right, "gradient_median", color="tab:gray")
    dots(right, "gradient_max", color=colour)
  left.set_yticks(range(len(names)), names)
  left.invert_yaxis()
  # What exploded would squeeze the rest.
  means = [
    np.mean([run["bits_per_byte"] for run in _by_seed(runs, name).values()])
    for name in names
  ]
  left.set_xlim(min(means) - 0.1, np.median(means) + 0.15)
  left.set(xlabel="validation bits per byte, by seed (bar: mean)")
  right.set(xlabel="gradient norm: median (gray), largest")
  right.set_xscale("log")
  for axes in (left, right):
    axes.grid(alpha=0.3)
  canvas.savefig(path, dpi=110)
