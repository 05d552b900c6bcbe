"""Does the state still help beyond the trained length? A table, two pictures.

  for m in trellis lattice key_value_means tensor_cache sliding_window; do
    for p in 0 0.2; do
      python train.py --config=configs/compare.py:$m --workdir=runs/$m-$p \
        --config.training.state_passing=$p \
        --config.evaluation.lengths=64 --config.evaluation.rows=8
    done
  done
  python benchmarks/model/length.py --data=docs/results/length.jsonl runs/*

Adds the runs that are named to <data>, a line each, in place of earlier ones of
the same mixer, passing and seed. Then draws what <data> holds beside it:
`length.png`, the gain of the state carried for every mixer, and `overview.png`,
which also shows recall against state (recall.jsonl of the same folder).
"""

import argparse
import json
import pathlib
from typing import Any

import numpy as np
from matplotlib import figure

Run = dict[str, Any]

MAIN = {
  "trellis": ("Trellis", "#D55E00", "o"),
  "lattice": ("Lattice", "#0072B2", "s"),
  "key_value_means": ("Key-Value Means", "#009E73", "^"),
  "tensor_cache": ("Tensor Cache", "#CC79A7", "D"),
  "sliding_window": ("window of 64", "#666666", "v"),
  "softmax_attention": ("full attention", "#000000", "x"),
}
"""Name, colour (Okabe and Ito) and marker of what the overview shows."""


def read(folder: pathlib.Path) -> Run:
  """A line of data from an evaluated run."""
  found = json.loads((folder / "eval/results.json").read_text("utf-8"))
  streamed = found["perplexity"]["streamed"]
  return {
    "mixer": found["name"].removeprefix("compare-"),
    "passing": found["config"]["training"]["state_passing"],
    "seed": found["seed"],
    "whole": found["perplexity"]["trained_length"]["bits_per_byte"],
    "window": streamed["window"],
    "first": [b["first"] for b in streamed["buckets"]],
    "carried": [b["bits_per_byte"] for b in streamed["buckets"]],
    "fresh": [b["fresh_bits_per_byte"] for b in streamed["buckets"]],
  }


def identity(run: Run) -> tuple:
  return run["mixer"], run["passing"], run["seed"]


def lines(path: pathlib.Path) -> list[Run]:
  """The lines of a file of JSON; none if there is no file."""
  if not path.exists():
    return []
  return [json.loads(x) for x in path.read_text("utf-8").splitlines()]


def grouped(runs: list[Run]) -> dict[tuple[str, bool], list[Run]]:
  """Seeds of each mixer, with and without passing."""
  groups: dict[tuple[str, bool], list[Run]] = {}
  for run in runs:
    groups.setdefault((run["mixer"], run["passing"] > 0), []).append(run)
  return groups


def mean(group: list[Run], name: str) -> np.ndarray:
  return np.mean([run[name] for run in group], axis=0)


def beyond(group: list[Run]) -> list[int]:
  """Buckets that begin at the trained length or later."""
  return [
    i for i, at in enumerate(group[0]["first"]) if at >= group[0]["window"]
  ]


def multiples(group: list[Run]) -> list[str]:
  """Those buckets in multiples of the trained length: "2-4"."""
  window, first = group[0]["window"], group[0]["first"]
  starts = [first[i] // window for i in beyond(group)]
  return [f"{start}-{2 * start}" for start in starts]


def table(groups: dict[tuple[str, bool], list[Run]]) -> str:
  """Bits gained by the carried state against fresh windows, in markdown."""
  names = multiples(next(iter(groups.values())))
  rows = [
    f"| mixer | state passing | seeds | whole text | {' | '.join(names)} |",
    "|---|---|---:|---:" + "|---:" * len(names) + "|",
  ]
  for (mixer, passing), group in sorted(groups.items()):
    gain = (mean(group, "carried") - mean(group, "fresh"))[beyond(group)]
    cells = " | ".join(f"{x:+.3f}" for x in gain)
    share = "0.2" if passing else "none"
    whole = mean(group, "whole")
    rows.append(f"| {mixer} | {share} | {len(group)} | {whole:.3f} | {cells} |")
  return "\n".join(rows) + "\n"


def draw_gains(groups, path: pathlib.Path) -> None:
  """A small panel for each mixer: carried minus fresh, by position."""
  mixers = sorted({mixer for mixer, _ in groups})
  columns = 4
  height = -(-len(mixers) // columns)
  canvas = figure.Figure(figsize=(11, 2.3 * height), layout="constrained")
  panels = canvas.subplots(height, columns, squeeze=False, sharex=True)
  for axes in panels.flat[len(mixers) :]:
    axes.set_axis_off()
  for axes, mixer in zip(panels.flat, mixers, strict=False):
    axes.axhline(0, color="black", linewidth=0.8)
    for passing, style in ((False, "s--"), (True, "o-")):
      group = groups.get((mixer, passing))
      if group is None:
        continue
      gain = (mean(group, "carried") - mean(group, "fresh"))[beyond(group)]
      axes.plot(
        multiples(group),
        gain,
        style,
        color="#0072B2" if passing else "#D55E00",
        markersize=4,
        label="with state passing" if passing else "without",
      )
    axes.set_title(mixer, fontsize=10)
    axes.set_yscale("symlog", linthresh=0.05)
    axes.set_ylim(-0.2, 3)
    axes.set_yticks([-0.1, -0.03, 0, 0.03, 0.1, 1])
    axes.set_yticklabels(["-0.1", "-0.03", "0", "0.03", "0.1", "1"])
    axes.minorticks_off()
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
  panels[0, 0].legend(fontsize=8)
  canvas.supxlabel("position, in multiples of the trained length", fontsize=10)
  canvas.supylabel("bits per byte, carried minus fresh state", fontsize=10)
  canvas.savefig(path, dpi=120, metadata={"Software": None})


def draw_overview(groups, recall: list[Run], path: pathlib.Path) -> None:
  """Reading on, and recall, of the four memories and two attentions."""
  canvas = figure.Figure(figsize=(11, 4.3), layout="constrained")
  reading, holding = canvas.subplots(1, 2)
  base = groups["sliding_window", True]
  for mixer, (label, colour, marker) in MAIN.items():
    group = groups.get((mixer, True)) or groups.get((mixer, False))
    style = {"color": colour, "marker": marker, "markersize": 5}
    if group is not None:
      over = [mean([run], "carried") - mean(base, "carried") for run in group]
      x = np.arange(len(group[0]["first"]))
      y = np.mean(over, axis=0)
      reading.plot(x, y, **style)
      reading.fill_between(
        x, np.min(over, axis=0), np.max(over, axis=0), color=colour, alpha=0.15
      )
      seen = min(y[-1], 0.19)
      reading.annotate(label, (x[-1] + 0.15, seen), color=colour, va="center")
    sizes = [run for run in recall if run["mixer"] == mixer]
    if sizes:
      found = np.array([run["accuracy"]["16"] for run in sizes])
      state = [4 * run["state_floats"] for run in sizes]
      holding.plot(state, found.mean(axis=1), **style)
      holding.fill_between(
        state, found.min(axis=1), found.max(axis=1), color=colour, alpha=0.15
      )
      holding.annotate(
        label,
        (state[0], found[0].mean()),
        xytext=(-6, 0),
        textcoords="offset points",
        color=colour,
        ha="right",
        va="center",
      )
  first, window = base[0]["first"], base[0]["window"]
  ticks = [f"{at / window:g}" for at in first]
  reading.set_xticks(range(len(first)), ticks)
  reading.set_xlim(-0.3, len(first) + 1.6)
  reading.set_ylim(-0.12, 0.2)
  reading.set(
    title="Reading on, the state carried",
    xlabel="position, in multiples of the trained length",
    ylabel="bits per byte beside a window of 64\n(lower is better)",
  )
  holding.set_xscale("log", base=2)
  holding.set_xlim(left=700)
  holding.set_ylim(0.5, 1.02)
  holding.set(
    title="16 pairs recalled",
    xlabel="bytes of state per layer",
    ylabel="accuracy, mean and range of two seeds",
  )
  for axes in (reading, holding):
    axes.grid(alpha=0.3)
  canvas.savefig(path, dpi=120, metadata={"Software": None})


def longest(recall: list[Run]) -> list[Run]:
  """Of each mixer and size the run of the most updates, by size."""
  found = {}
  for run in sorted(recall, key=lambda run: run["task"]["steps"]):
    found[run["mixer"], run["state_floats"]] = run
  return sorted(found.values(), key=lambda run: run["state_floats"])


def main() -> None:
  """Adds runs to the data, and draws it."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("runs", nargs="*", type=pathlib.Path)
  parser.add_argument("--data", type=pathlib.Path, required=True)
  arguments = parser.parse_args()
  runs = {identity(run): run for run in lines(arguments.data)}
  runs |= {identity(run): run for run in map(read, arguments.runs)}
  ordered = [runs[key] for key in sorted(runs)]
  arguments.data.write_text(
    "".join(json.dumps(run) + "\n" for run in ordered), encoding="utf-8"
  )
  groups = grouped(ordered)
  print(table(groups))
  folder = arguments.data.parent
  draw_gains(groups, folder / "length.png")
  if ("sliding_window", True) in groups:  # what the others are held against
    recall = longest(lines(folder / "recall.jsonl"))
    draw_overview(groups, recall, folder / "overview.png")


if __name__ == "__main__":
  main()
