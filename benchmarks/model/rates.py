"""Bits per byte of one mixer's runs by learning rate and seed, as data.

  python benchmarks/model/rates.py --out=docs/results/rates.jsonl RUN...

Each RUN is the folder of a run that was evaluated; its config says the mixer
and the rate. `python benchmarks/model/tables.py` writes the table.
"""

import argparse
import json
import pathlib
from typing import Any

import numpy as np

Run = dict[str, Any]


def read(folder: pathlib.Path) -> Run:
  """Rate, seed and bits per byte of a run."""
  found = json.loads((folder / "eval/results.json").read_text("utf-8"))
  return {
    "mixer": found["name"].removeprefix("compare-"),
    "learning_rate": found["config"]["optimizer"]["learning_rate"],
    "seed": found["seed"],
    "bits": round(found["perplexity"]["trained_length"]["bits_per_byte"], 4),
  }


def table(runs: list[Run]) -> str:
  """Rates with seed 0, which chose; then the chosen rate with other seeds."""
  rates = sorted({run["learning_rate"] for run in runs})
  rows = []
  for mixer in dict.fromkeys(run["mixer"] for run in runs):
    of = [run for run in runs if run["mixer"] == mixer]
    first = {r["learning_rate"]: r["bits"] for r in of if r["seed"] == 0}
    best = min(first, key=lambda rate: first[rate])
    rest = [r["bits"] for r in of if r["seed"] and r["learning_rate"] == best]
    tried = [f"{first[rate]:.3f}" if rate in first else "-" for rate in rates]
    each = ", ".join(f"{x:.3f}" for x in rest) or "-"
    mean = np.mean(rest) if rest else np.inf
    rows.append((mean, [mixer, *tried, f"{best:g}", each]))
  head = ["model", *(f"{rate:g}" for rate in rates), "chosen", "other seeds"]
  rule = ["---", *["---:" for _ in rates], "---:", "---"]
  lines = [head, rule, *(row for _, row in sorted(rows, key=lambda x: x[0]))]
  return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
  """Writes the data of the runs that are named."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("runs", nargs="+", type=pathlib.Path)
  flags = parser.parse_args()
  runs = sorted(
    map(read, flags.runs),
    key=lambda r: (r["mixer"], r["learning_rate"], r["seed"]),
  )
  text = "".join(json.dumps(run) + "\n" for run in runs)
  flags.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
  main()
