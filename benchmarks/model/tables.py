"""Writes the tables of pages that are made from data in docs/results.

  python benchmarks/model/tables.py

A page marks where a table belongs by two comments, for example
`<!-- table: recall, 500 updates, heads of 16 -->` and `<!-- end -->`; what
stands between them is replaced. Run it after a change of the data.
"""

import argparse
import functools
import json
import pathlib
import re
import sys
from typing import Any

import csv_tables
import length
import numpy as np
import quickstart
import rates

sys.path.append(str(pathlib.Path(__file__).parents[1] / "ops"))

import by_length

Run = dict[str, Any]

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"

BLOCK = re.compile(r"(<!-- table: ([^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[pathlib.Path]:
  """The pages that may have such tables."""
  return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str, folder: pathlib.Path = RESULTS) -> str:
  """The text of a page with its tables written anew from data of `folder`."""

  def write(found: re.Match[str]) -> str:
    start, name, end = found.groups()
    kind, *options = name.split(", ")
    return f"{start}\n{TABLES[kind](folder, *options)}\n{end}"

  return BLOCK.sub(write, text)


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


_RECALL_USUAL = {"optimizer": "adamw", "learning_rate": 0.005}


def recall_options(folder: pathlib.Path) -> str:
  """Accuracy at the most pairs by seed, of other options."""
  rows = [
    ["mixer", "heads of", "changed", "16 pairs, by seed"],
    ["---", "---:", "---", "---"],
  ]
  for run in length.lines(folder / "recall-options.jsonl"):
    other = {k: run["task"][k] for k in _RECALL_USUAL}
    other = {k: v for k, v in other.items() if v != _RECALL_USUAL[k]}
    changed = [f"`{k}={v}`" for k, v in (other | run["options"]).items()]
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


def time_by_length(folder: pathlib.Path, column: str) -> str:
  """Microseconds a token of each memory; `column` is of the file's rows."""
  measured = json.loads((folder / "lengths.json").read_text("utf-8"))
  return by_length.table(measured["rows"], column)


def by_rate(folder: pathlib.Path) -> str:
  """Bits per byte of each mixer by learning rate."""
  return rates.by_rate(length.lines(folder / "rates.jsonl"))


def tuned(folder: pathlib.Path) -> str:
  """Bits per byte with Muon and each mixer's own options."""
  return rates.tuned(length.lines(folder / "rates.jsonl"))


def by_option(folder: pathlib.Path, *, optimizer: bool = False) -> str:
  """Bits per byte of mixers with options changed, or with another optimizer."""
  runs = length.lines(folder / "rates.jsonl")
  return rates.by_option(runs, optimizer=optimizer)


def quickstart_positions(folder: pathlib.Path, case: str) -> str:
  """Bits per byte by position of the runs of a case."""
  return quickstart.positions(_quickstarts(folder, case))


def quickstart_carried(folder: pathlib.Path, case: str, label: str) -> str:
  """The same of one run, a row with its state carried and one without."""
  return quickstart.reading_on(_quickstarts(folder, case), label)


def quickstart_coders(folder: pathlib.Path) -> str:
  """Bits per byte of the whole text, beside those of other programs."""
  rows = [["", "bits per byte"], ["---", "---"]]
  for row in csv_tables.lines(folder / "quickstart-coders.csv"):
    rows.append([row["coder"], f"{row['bits']:.3f}"])
  for case, name in quickstart.NAMES.items():
    bits = quickstart.whole_text(_quickstarts(folder, case))
    rows.append([f"{name}, by seed", bits])
  return rates.markdown(*rows)


def _quickstarts(folder: pathlib.Path, case: str) -> list[Run]:
  runs = length.lines(folder / "quickstart.jsonl")
  found = [run for run in runs if run["case"] == case]
  if not found:
    raise ValueError(f"quickstart.jsonl has no run of the case {case!r}")
  return found


def gpu_checks(folder: pathlib.Path) -> str:
  """Which calls of each kernel a GPU has computed right."""
  found: dict[tuple[str, str], dict[int, list[str]]] = {}
  for row in length.lines(folder / "gpu.jsonl"):
    if "check" in row and row["wrong"] is None:
      dims = found.setdefault((row["check"], row["form"]), {})
      dims.setdefault(row["dim"], []).append(row["heads"])
  rows = [["case", "form", "dims of 64", "dims of 128"], ["---"] * 4]
  for names, dims in sorted(found.items()):
    rows.append(
      [*names, *(", ".join(dims.get(n, ["not run"])) for n in (64, 128))]
    )
  return rates.markdown(*rows)


def gpu_forms(folder: pathlib.Path) -> str:
  """Times of ops by kernels, and by the XLA form."""
  rows = [
    [
      *("case", "shape", "kernels: forward, ms", "with gradients"),
      *("XLA form: forward, ms", "with gradients", "over the kernels'"),
    ],
    [*["---"] * 2, *["---:"] * 5],
  ]
  found = [x for x in length.lines(folder / "gpu.jsonl") if "both_s" in x]
  for row in found:
    if row["form"] != "xla_chunked":
      continue
    kernels = next(
      (
        x
        for x in found
        if x["form"] in ("mosaic_gpu", "library_gpu")
        and (x["case"], x["shape"]) == (row["case"], row["shape"])
      ),
      {},
    )
    times = [
      f"{1e3 * x[name]:.2f}" if x else ""
      for x in (kernels, row)
      for name in ("forward_s", "both_s")
    ]
    ratio = f"{row['both_s'] / kernels['both_s']:.1f}" if kernels else ""
    rows.append([row["case"], row["shape"], *times, ratio])
  return rates.markdown(*rows)


def gpu_rivals(folder: pathlib.Path) -> str:
  """Times of flash-linear-attention's forward, and of ours."""
  rows = [["case", "shape", "flash-linear-attention, ms", "ours, ms"]]
  rows.append([*["---"] * 2, *["---:"] * 2])
  found = [x for x in length.lines(folder / "gpu.jsonl") if "case" in x]
  for row in found:
    if not row["form"].startswith("fla "):
      continue
    at = row["case"], row["shape"], "mosaic_gpu"
    ours = next(x for x in found if (x["case"], x["shape"], x["form"]) == at)
    times = [f"{1e3 * x['forward_s']:.2f}" for x in (row, ours)]
    rows.append([row["case"], row["shape"], *times])
  return rates.markdown(*rows)


def gpu_steps(folder: pathlib.Path) -> str:
  """Times of training steps of whole models."""
  found = [x for x in length.lines(folder / "gpu.jsonl") if "step" in x]
  base = {
    x["length"]: x["step_s"] for x in found if x["step"] == "softmax_attention"
  }
  rows = [
    [
      *("model", "form", "tokens a row", "step, ms", "tokens/s"),
      *("of attention's", "loss, step 7"),
    ],
    [*["---"] * 2, *["---:"] * 5],
  ]
  for row in sorted(found, key=lambda x: (x["length"], x["step_s"])):
    rows.append(
      [
        row["step"],
        row["form"],
        f"{row['length']:,}",
        f"{1e3 * row['step_s']:.0f}",
        f"{row['tokens'] / row['step_s']:,.0f}",
        f"{base[row['length']] / row['step_s']:.2f}",
        f"{row['loss']:.4f}",
      ]
    )
  return rates.markdown(*rows)


TABLES = {
  "recall": recall,
  "recall options": recall_options,
  "length": gains,
  "lengths": time_by_length,
  "rates": by_rate,
  "options": by_option,
  "tuned": tuned,
  "optimizers": functools.partial(by_option, optimizer=True),
  "quickstart": quickstart_positions,
  "quickstart carried": quickstart_carried,
  "quickstart coders": quickstart_coders,
  "gpu checks": gpu_checks,
  "gpu forms": gpu_forms,
  "gpu rivals": gpu_rivals,
  "gpu steps": gpu_steps,
  **{
    kind: functools.partial(csv_tables.table, kind)
    for kind in csv_tables.TABLES
  },
}


def main() -> None:
  """Rewrites the tables in the pages."""
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  for page in pages():
    page.write_text(filled(page.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
  main()
