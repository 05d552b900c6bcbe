"""Bits per byte by position of several evaluated runs: a table and a figure.

  python benchmarks/model/positions.py --out=positions \
    runs/quickstart runs/long_context

Reads `eval/results.json` of each. Solid: the state handed on from window to
window. Dashed: the same tokens with a fresh state every window; in the table
they stand in brackets. Bars and +-: standard error over the spans. Runs of one
name are one line, the mean over their seeds. Writes <out>.png.
"""

import json
import pathlib
from typing import Any

import numpy as np
from absl import app, flags

_OUT = flags.DEFINE_string("out", "positions", "Figure's path, no suffix.")
_FRESH = flags.DEFINE_bool("fresh", True, "Also a fresh state every window.")

Group = list[dict[str, Any]]
"""Results of one name, of each seed."""


def read(folders: list[str]) -> dict[str, Group]:
  """Results by name, in the order they are first named in."""
  groups: dict[str, Group] = {}
  for folder in folders:
    path = pathlib.Path(folder) / "eval/results.json"
    if not path.exists():
      raise app.UsageError(f"{path}: no such file; is the run finished?")
    result = json.loads(path.read_text(encoding="utf-8"))
    groups.setdefault(result["name"], []).append(result["perplexity"])
  windows = {run["streamed"]["window"] for of in groups.values() for run in of}
  if len(windows) > 1:
    raise app.UsageError(f"runs of several windows: {sorted(windows)}")
  return groups


def mean(group: Group, name: str) -> np.ndarray:
  """Mean over seeds of a number of each bucket."""
  found = [[b[name] for b in run["streamed"]["buckets"]] for run in group]
  return np.mean(np.array(found, float), axis=0)


def error(group: Group) -> np.ndarray:
  """Standard error over the spans, which are those of every seed."""
  return mean(group, "std_over_rows") / group[0]["streamed"]["rows"] ** 0.5


def _names(group: Group) -> list[str]:
  buckets = group[0]["streamed"]["buckets"]
  return [f"{b['first']:,}-{b['last']:,}" for b in buckets]


def table(groups: dict[str, Group]) -> str:
  """All of it in markdown."""
  names = _names(next(iter(groups.values())))
  lines = [
    f"| | seeds | whole text | {' | '.join(names)} |",
    "|---|---:|---:" + "|---:" * len(names) + "|",
  ]
  for name, group in groups.items():
    whole = np.mean([run["trained_length"]["bits_per_byte"] for run in group])
    columns = zip(
      mean(group, "bits_per_byte"),
      error(group),
      mean(group, "fresh_bits_per_byte"),
      strict=True,
    )
    cells = [
      f"{bits:.3f} +- {std:.3f}" + f" ({fresh:.3f})" * _FRESH.value
      for bits, std, fresh in columns
    ]
    head = f"{name} | {len(group)} | {whole:.3f}"
    lines.append(f"| {head} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def draw(groups: dict[str, Group], path: pathlib.Path) -> None:
  """A line for each name, and one for its fresh states."""
  try:
    from matplotlib import figure
  except ImportError:
    print(
      "no figure: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
    return
  canvas = figure.Figure(figsize=(7, 4), layout="constrained")
  axes = canvas.subplots()
  for i, (name, group) in enumerate(groups.items()):
    names, bits = _names(group), mean(group, "bits_per_byte")
    style = {"color": f"C{i}", "markersize": 4}
    axes.errorbar(
      names, bits, error(group), marker="o", capsize=3, label=name, **style
    )
    if _FRESH.value:
      fresh = mean(group, "fresh_bits_per_byte")
      axes.plot(names, fresh, linestyle="--", marker="s", **style)
  window = next(iter(groups.values()))[0]["streamed"]["window"]
  axes.set(
    xlabel=f"position in the text (bytes; trained on windows of {window})",
    ylabel="bits per byte (lower is better)",
  )
  axes.tick_params(axis="x", labelsize="small")
  axes.grid(alpha=0.3)
  axes.legend(fontsize="small")
  canvas.savefig(path, dpi=110)
  print(f"written: {path}")


def main(argv):
  """Reads the runs that are named and reports on them."""
  if len(argv) < 2:
    raise app.UsageError("name at least one evaluated run")
  groups = read(argv[1:])
  print(table(groups))
  draw(groups, pathlib.Path(f"{_OUT.value}.png"))


if __name__ == "__main__":
  app.run(main)
