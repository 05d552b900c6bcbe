"""Runs of the quickstart and of its variants, as data and as tables.

  python benchmarks/model/quickstart.py --case="first command" \
    --label="seed 0" RUN

Adds an evaluated run to docs/results/quickstart.jsonl, in place of the earlier
one with that case and label. `python benchmarks/model/tables.py` writes the
tables.
"""

import argparse
import itertools
import pathlib
import re
from typing import Any

import length
import rates

Run = dict[str, Any]

NAMES = {
  "first command": "Trellis, 0.5 M parameters, 4.3 M training bytes",
  "AdamW": "Trellis with AdamW, 4.8 M training bytes",
  "AdamW fresh": "Trellis with AdamW, without state passing",
}
"""Cases that stand beside other programs."""

DATA = pathlib.Path(__file__).parents[2] / "docs/results/quickstart.jsonl"


def read(folder: pathlib.Path, **more: str) -> Run:
  """A line of data from an evaluated run, to three digits."""
  run = length.read(folder)
  kept: Run = {**more, "whole": round(run["whole"], 3)}
  kept["first"] = run["first"]
  for name in ("carried", "fresh"):
    kept[name] = [round(x, 3) for x in run[name]]
  return kept


def identity(run: Run) -> tuple:
  return run["case"], run["label"]


def positions(runs: list[Run]) -> str:
  """Bits per byte of each run: with the state carried, and with a fresh one."""
  spans = _spans(runs[0])
  timed = any("time" in run for run in runs)
  rows = [
    ["", "whole text", *spans, *["time"] * timed],
    ["---"] * (2 + len(spans) + timed),
  ]
  for run in runs:
    pairs = list(zip(run["carried"], run["fresh"], strict=True))
    cells = [f"{carried:.3f} ({fresh:.3f})" for carried, fresh in pairs]
    cells[0] = f"{pairs[0][0]:.3f}"  # where both start fresh
    whole = f"{run['whole']:.3f}"
    rows.append([run["label"], whole, *cells, *[run.get("time", "")] * timed])
  return rates.markdown(*rows)


def reading_on(runs: list[Run], label: str) -> str:
  """One run, its state carried and fresh, a row each."""
  (run,) = [run for run in runs if run["label"] == label]
  spans = _spans(run)[1:]
  rows = [[f"bits per byte by position, {label}", *spans]]
  rows.append(["---"] * (1 + len(spans)))
  for name, key in {
    "state carried": "carried",
    "fresh state every 256 bytes": "fresh",
  }.items():
    rows.append([name, *(f"{x:.3f}" for x in run[key][1:])])
  return rates.markdown(*rows)


def whole_text(runs: list[Run]) -> str:
  """Bits per byte of the whole text by the seeds of a case, in their order."""
  seeds = [x for x in runs if re.fullmatch(r"seed \d", x["label"])]
  return ", ".join(f"{x['whole']:.3f}" for x in seeds)


def _spans(run: Run) -> list[str]:
  ends = [*run["first"], 2 * run["first"][-1]]
  return [f"{at:,}-{end - 1:,}" for at, end in itertools.pairwise(ends)]


def main() -> None:
  """Adds the run that is named to the data."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--case", required=True)
  parser.add_argument("--label", required=True)
  parser.add_argument("--time", help="of the command, such as '7 min 8 s'")
  parser.add_argument("run", type=pathlib.Path)
  flags = parser.parse_args()
  more = {"time": flags.time} if flags.time else {}
  run = read(flags.run, case=flags.case, label=flags.label, **more)
  length.added(DATA, [run], identity)


if __name__ == "__main__":
  main()
