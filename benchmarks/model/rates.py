"""Bits per byte of runs of `configs/compare.py`, as data.

  python benchmarks/model/rates.py --out=docs/results/rates.jsonl RUN...

Each RUN is the folder of a run that was evaluated. Its config says the mixer,
the rate, the seed, and which options are not those of `configs/compare.py`.
Lines are added to the data, in place of earlier ones that are equal in these.
`python benchmarks/model/tables.py` writes the tables.
"""

import argparse
import json
import pathlib
from typing import Any

import length
import numpy as np

from memcomp import config
from memcomp.models import comparison

Run = dict[str, Any]


def read(folder: pathlib.Path) -> Run:
  """Mixer, rate, seed, changed options and bits per byte of a run."""
  found = json.loads((folder / "eval/results.json").read_text("utf-8"))
  mixer = found["name"].removeprefix("compare-")
  run = {
    "mixer": mixer,
    "learning_rate": found["config"]["optimizer"]["learning_rate"],
    "seed": found["seed"],
    "bits": round(found["perplexity"]["trained_length"]["bits_per_byte"], 4),
  }
  changes = _changes(mixer, found["config"])
  return run | ({"changes": changes} if changes else {})


def identity(run: Run) -> tuple:
  """What two runs of one line of data share; also the order of the lines."""
  changes = str(run.get("changes", ""))
  return run["mixer"], run["learning_rate"], changes, run["seed"]


def _changes(mixer: str, run: dict[str, Any]) -> dict[str, Any]:
  """What is not the comparison's: options of the mixer, dtype, optimizer."""
  model, usual = run["model"], config.to_dict(comparison.language_model(mixer))
  name = run["optimizer"].get("name", "adamw")  # that of earlier runs
  pairs = [
    (model["mixers"]["memory"], usual["mixers"]["memory"]),
    ({"dtype": model["dtype"]}, {"dtype": usual["dtype"]}),
    ({"optimizer.name": name}, {"optimizer.name": "adamw"}),
  ]
  return {k: a[k] for a, b in pairs for k in a if a[k] != b.get(k)}


def by_rate(runs: list[Run]) -> str:
  """Rates with seed 0, which chose; then the chosen rate with other seeds."""
  runs = [run for run in runs if "changes" not in run]
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
  return markdown(head, rule, *(row for _, row in sorted(rows)))


_MUON = {"optimizer.name": "muon"}


def by_option(runs: list[Run], optimizer: bool) -> str:
  """Changed options: bits by seed beside those without the change.

  Differences are of the same rate and seed; runs without a partner are left
  out.

  Args:
    runs: the data.
    optimizer: whether of Muon alone, or of the options of a mixer with AdamW.
  """
  usual, changed = {}, {}
  for run in runs:
    key = run["mixer"], run["learning_rate"]
    if changes := run.get("changes"):
      if optimizer != (changes == _MUON):
        continue
      if not optimizer and "optimizer.name" in changes:
        continue
      changed.setdefault((*key, _named(changes)), {})[run["seed"]] = run["bits"]
    else:
      usual.setdefault(key, {})[run["seed"]] = run["bits"]
  rows = []
  for (mixer, rate, name), bits in changed.items():
    base = usual.get((mixer, rate), {})
    both = sorted(bits.keys() & base.keys())
    if not both:
      continue
    less = [bits[seed] - base[seed] for seed in both]
    cells = [", ".join(f"{x[s]:.3f}" for s in both) for x in (base, bits)]
    row = [
      mixer,
      name,
      f"{rate:g}",
      *cells,
      ", ".join(f"{x:+.3f}" for x in less),
    ]
    rows.append((mixer, np.mean(less), row))
  head = [
    "model",
    "changed",
    "rate",
    "unchanged, by seed",
    "changed, by seed",
    "difference",
  ]
  rule = ["---", "---", "---:", "---", "---", "---"]
  return markdown(head, rule, *(row for *_, row in sorted(rows)))


def tuned(runs: list[Run]) -> str:
  """A mixer's own options with Muon: seed 0 chose one, other seeds had it."""
  found: dict[str, dict[str, dict[int, float]]] = {}
  for run in runs:
    changes = run.get("changes", {})
    if changes.items() >= _MUON.items():
      own = {k: v for k, v in changes.items() if k not in _MUON}
      of = found.setdefault(run["mixer"], {}).setdefault(_named(own), {})
      of[run["seed"]] = run["bits"]
  rows = []
  for mixer, of in found.items():
    first = {own: bits[0] for own, bits in of.items() if 0 in bits}
    tried = sorted(first, key=lambda own: first[own])
    best = tried[0]
    chosen = of[best]
    rest = [bits for seed, bits in sorted(chosen.items()) if seed]
    usual = of[""] if best else {}
    gains = [
      f"{bits - usual[seed]:+.3f}" if seed in usual else "-"
      for seed, bits in sorted(chosen.items())
      if seed
    ]
    cells = [
      f"{first['']:.3f}",
      "; ".join(f"{own}: {first[own]:.3f}" for own in tried if own) or "-",
      best or "as it stands",
      ", ".join(f"{x:.3f}" for x in rest) or "-",
      f"{np.mean(rest):.3f}" if rest else "-",
      ", ".join(gains) or "-",
    ]
    rows.append((np.mean(rest) if rest else first[best], [mixer, *cells]))
  head = [
    "model",
    "as it stands",
    "changed",
    "chosen",
    "other seeds",
    "their mean",
    "against as it stands, by seed",
  ]
  rule = ["---", "---:", "---", "---", "---", "---:", "---"]
  return markdown(head, rule, *(row for _, row in sorted(rows)))


def _named(changes: dict[str, Any]) -> str:
  return ", ".join(f"`{k}={v}`" for k, v in changes.items())


def markdown(*rows: list[str]) -> str:
  """Returns a table of the rows; the second is its rule."""
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
  """Adds the runs that are named to the data."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("runs", nargs="+", type=pathlib.Path)
  flags = parser.parse_args()
  length.added(flags.out, [read(run) for run in flags.runs], identity)


if __name__ == "__main__":
  main()
