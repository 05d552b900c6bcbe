"""Writes the tables of docs/results that are made from data beside the pages.

  python benchmarks/model/tables.py

A page marks where a table belongs by two comments, for example
`<!-- table: recall, 500 updates, heads of 16 -->` and `<!-- end -->`; what
stands between them is replaced. Run it after a change of the data.
"""

import argparse
import pathlib
import re
from typing import Any

import length
import numpy as np
import rates

Run = dict[str, Any]

RESULTS = pathlib.Path(__file__).parents[2] / "docs/results"

_BLOCK = re.compile(r"(<!-- table: ([^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, folder: pathlib.Path = RESULTS) -> str:
  """The text of a page with its tables written anew from data of `folder`."""

  def write(found: re.Match[str]) -> str:
    start, name, end = found.groups()
    kind, *options = name.split(", ")
    return f"{start}\n{TABLES[kind](folder, *options)}\n{end}"

  return _BLOCK.sub(write, text)


def recall(folder: pathlib.Path, updates: str, heads: str = "") -> str:
  """Accuracy of each mixer, with "500 updates" and "heads of 16" features.

  Without `heads` all sizes, the largest first.
  """
  steps, size = int(updates.split()[0]), heads.removeprefix("heads of ")
  runs = [
    run
    for run in length.lines(folder / "recall.jsonl")
    if run["task"]["steps"] == steps and size in ("", str(run["head_dim"]))
  ]
  pairs = list(runs[0]["accuracy"])

  def worst_last(run):
    means = [-round(np.mean(run["accuracy"][n]), 3) for n in reversed(pairs)]
    return not size and -run["head_dim"], means, run["mixer"]

  rows = [
    [
      "mixer",
      "heads of",
      "floats of state a layer",
      *(f"{n} pairs" for n in pairs),
    ],
    ["---", "---:", "---:", *("---" for _ in pairs)],
  ]
  for run in sorted(runs, key=worst_last):
    found = [seeds(run["accuracy"][n]) for n in pairs]
    state = f"{run['state_floats']:,}"
    rows.append([run["mixer"], str(run["head_dim"]), state, *found])
  if size:  # it stands above the table
    rows = [row[:1] + row[2:] for row in rows]
  return rates.markdown(*rows)


def recall_options(folder: pathlib.Path) -> str:
  """Accuracy at the most pairs by seed, of other options."""
  rows = [
    ["mixer", "heads of", "changed", "16 pairs, by seed"],
    ["---", "---:", "---", "---"],
  ]
  for run in length.lines(folder / "recall-options.jsonl"):
    changed = [f"`{k}={v}`" for k, v in run["options"].items()]
    each = ", ".join(f"{x:.2f}" for x in run["accuracy"]["16"])
    what = ", ".join(changed) or "nothing"
    rows.append([run["mixer"], str(run["head_dim"]), what, each])
  return rates.markdown(*rows)


def seeds(found: list[float]) -> str:
  """The mean; in brackets each seed's, where they differ."""
  each = [f"{x:.3f}" for x in found]
  more = f" ({', '.join(each)})" if len(set(each)) > 1 else ""
  return f"{np.mean(found):.3f}{more}"


def gains(folder: pathlib.Path) -> str:
  """Bits per byte that the carried state gains, by position."""
  return length.table(length.grouped(length.lines(folder / "length.jsonl")))


def by_rate(folder: pathlib.Path) -> str:
  """Bits per byte of each mixer by learning rate."""
  return rates.by_rate(length.lines(folder / "rates.jsonl"))


def by_option(folder: pathlib.Path) -> str:
  """Bits per byte of mixers with one or several of their options changed."""
  return rates.by_option(length.lines(folder / "rates.jsonl"))


TABLES = {
  "recall": recall,
  "recall options": recall_options,
  "length": gains,
  "rates": by_rate,
  "options": by_option,
}


def main() -> None:
  """Rewrites the tables in the pages."""
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  for path in RESULTS.glob("*.md"):
    path.write_text(filled(path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
  main()
