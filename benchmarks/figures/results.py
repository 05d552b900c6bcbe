"""Draws figures of docs/results from the CSV files beside them.

  python benchmarks/figures/results.py

Writes `gaps.png` and `inference.png` beside the numbers that they show, or into
another folder (`--out`).
"""

import argparse
import csv
import pathlib

import numpy as np
from matplotlib import figure, patches

DOCS = pathlib.Path(__file__).parents[2] / "docs/results"

Row = dict[str, str]

_USUAL = "#0072B2"
_MARKED = "#D55E00"
"""Blue and vermilion of Okabe and Ito: the colour-blind can tell them apart."""


def rows(path: pathlib.Path) -> list[Row]:
  """The lines of a file of CSV."""
  with path.open(encoding="utf-8", newline="") as file:
    return list(csv.DictReader(file))


def gaps(table: list[Row]) -> figure.Figure:
  """Accuracy of each method at each gap, a panel for each trained gap."""
  kinds = [f"gap {gap}" for gap in (24, 36, 48)]
  of_kind = {k: [r for r in table if r["trained_at"] == k] for k in kinds}
  columns = [
    name
    for name in table[0]
    if name.startswith("accuracy_") and of_kind[kinds[0]][0][name]
  ]
  names = [name.removeprefix("accuracy_") for name in columns]
  canvas = figure.Figure(figsize=(12, 4.6), layout="constrained")
  for axes, (kind, methods) in zip(
    canvas.subplots(1, 3), of_kind.items(), strict=True
  ):
    # Best at its own gap first; by name where several recall everything.
    trained = columns[names.index(kind.removeprefix("gap "))]
    methods = sorted(methods, key=lambda r: (-float(r[trained]), r["name"]))
    values = np.array([[float(r[c]) for c in columns] for r in methods])
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1.25, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
      colour = "white" if value > 0.7 else "black"
      text = f"{100 * value:.0f}"
      axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(methods)), [r["name"] for r in methods])
    at = columns.index(trained)
    axes.add_patch(
      patches.Rectangle(
        (at - 0.5, -0.5), 1, len(methods), fill=False, edgecolor=_MARKED, lw=2.5
      )
    )
    axes.set(title=f"trained at {kind}", xlabel="gap of the question, tokens")
    axes.tick_params(length=0)
  canvas.suptitle(
    "Pairs recalled over a gap, per cent; chance is 6. Frame: the trained gap"
  )
  return canvas


def inference(table: list[Row]) -> figure.Figure:
  """State and time of a token, behind the shortest and the longest context."""
  panels = (
    ("state_kib", "KiB of state"),
    ("ms_per_token", "milliseconds a token"),
    ("tokens_per_second", "tokens/s read"),
  )
  # The last is drawn highest.
  table = sorted(table, key=lambda r: -float(r["state_kib_last"]))
  height = range(len(table))
  first, last = (
    f"{int(table[0][f'context_{end}']) // 1024}k" for end in ("first", "last")
  )
  canvas = figure.Figure(figsize=(12, 6), layout="constrained")
  drawn = canvas.subplots(1, 3, sharey=True)
  for axes, (column, title) in zip(drawn, panels, strict=True):
    ends = [
      [float(r[f"{column}_{end}"]) for r in table] for end in ("first", "last")
    ]
    colours = [
      _MARKED if a > 2 * b or b > 2 * a else _USUAL
      for a, b in zip(*ends, strict=True)
    ]
    axes.hlines(height, *ends, color=colours, linewidth=2)
    axes.scatter(
      ends[0],
      height,
      s=60,
      facecolor="white",
      edgecolor=colours,
      label=f"behind {first} tokens",
    )
    axes.scatter(ends[1], height, s=18, color=colours, label=f"behind {last}")
    axes.set(xscale="log", title=title)
    axes.grid(alpha=0.3)
  drawn[0].set_yticks(height, [r["model"] for r in table])
  drawn[1].legend(loc="center right")
  return canvas


def main() -> None:
  """Draws both."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, default=DOCS)
  folder = parser.parse_args().out
  for draw in (gaps, inference):
    canvas = draw(rows(DOCS / f"{draw.__name__}.csv"))
    path = folder / f"{draw.__name__}.png"
    canvas.savefig(path, dpi=120, metadata={"Software": None})
    print(f"written: {path}")


if __name__ == "__main__":
  main()
