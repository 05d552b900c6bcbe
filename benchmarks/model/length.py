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
from collections.abc import Callable
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


def added(
  path: pathlib.Path, runs: list[Run], identity: Callable[[Run], tuple]
) -> list[Run]:
  """Writes runs into a file of lines; returns all that it then holds, in order.

  A run takes the place of one with the same identity.
  """
  known = {identity(run): run for run in lines(path) + runs}
  ordered = [known[key] for key in sorted(known)]
  text = "".join(json.dumps(run) + "\n" for run in ordered)
  path.write_text(text, encoding="utf-8")
  return ordered


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
  # The lowest of each column, whether or not its row is full.
  for axes in panels.flat[max(0, len(mixers) - columns) : len(mixers)]:
    axes.tick_params(labelbottom=True)
  # Of a panel with both lines, if there is one.
  most = max(panels.flat, key=lambda axes: len(axes.get_lines()))
  most.legend(fontsize=8)
  canvas.supxlabel("position, in multiples of the trained length", fontsize=10)
  canvas.supylabel("bits per byte, carried minus fresh state", fontsize=10)
  canvas.savefig(path, dpi=120, metadata={"Software": None})


def apart(places: dict[str, float], least: float) -> dict[str, float]:
  """Moves labels up until each is `least` above the one below it."""
  moved: dict[str, float] = {}
  for name in sorted(places, key=places.__getitem__):
    moved[name] = max([places[name], *(y + least for y in moved.values())])
  return moved


def draw_reading(groups, axes) -> None:
  """Bits per byte by position, beside the window's."""
  (base,) = groups["sliding_window", True][:1]
  highest, ends = 0.2, {}
  for mixer, (_, colour, marker) in MAIN.items():
    group = groups.get((mixer, True)) or groups.get((mixer, False))
    if group is None:
      continue
    over = [np.array(run["carried"]) - base["carried"] for run in group]
    x, y = np.arange(len(over[0])), np.mean(over, axis=0)
    axes.plot(x, y, color=colour, marker=marker, markersize=5)
    axes.fill_between(
      x, np.min(over, axis=0), np.max(over, axis=0), color=colour, alpha=0.15
    )
    ends[mixer] = min(y[-1], highest - 0.008)
  last = len(base["first"]) - 1
  for mixer, y in apart(ends, 0.014).items():
    name, colour, _ = MAIN[mixer]
    axes.annotate(name, (last + 0.2, y), color=colour, va="center")
  ticks = [f"{at / base['window']:g}" for at in base["first"]]
  axes.set_xticks(range(last + 1), ticks)
  axes.set_xlim(-0.3, last + 2.9)
  axes.set_ylim(-0.06, highest)
  axes.set(
    title="Reading on, the state carried",
    xlabel="position, in multiples of the trained length",
    ylabel="bits per byte more than a window of 64",
  )


def draw_recall(recall: list[Run], axes) -> None:
  """Accuracy at 16 pairs by bytes of state."""
  starts = {}
  for mixer, (_, colour, marker) in MAIN.items():
    sizes = [run for run in recall if run["mixer"] == mixer]
    if not sizes:
      continue
    found = np.array([run["accuracy"]["16"] for run in sizes])
    state = [4 * run["state_floats"] for run in sizes]
    axes.plot(
      state, found.mean(axis=1), color=colour, marker=marker, markersize=5
    )
    axes.fill_between(
      state, found.min(axis=1), found.max(axis=1), color=colour, alpha=0.15
    )
    starts[mixer] = state[0], found[0].mean()
  for mixer, y in apart({k: y for k, (_, y) in starts.items()}, 0.03).items():
    name, colour, _ = MAIN[mixer]
    full = mixer == "softmax_attention"  # right of the others: label above
    axes.annotate(
      name,
      (starts[mixer][0], y),
      xytext=(0, 8) if full else (-7, 0),
      textcoords="offset points",
      color=colour,
      ha="center" if full else "right",
      va="center",
    )
  axes.set_xscale("log", base=2)
  axes.set_xlim(left=600)
  axes.set_ylim(0.5, 1.05)
  axes.set(
    title="16 pairs recalled",
    xlabel="bytes of state per layer",
    ylabel="accuracy, mean and range of two seeds",
  )


def draw_overview(groups, recall: list[Run], path: pathlib.Path) -> None:
  """Reading on, and recall, of the four memories and two attentions."""
  canvas = figure.Figure(figsize=(11, 4.3), layout="constrained")
  reading, holding = canvas.subplots(1, 2)
  draw_reading(groups, reading)
  draw_recall(recall, holding)
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
  runs = [read(run) for run in arguments.runs]
  groups = grouped(added(arguments.data, runs, identity))
  print(table(groups))
  folder = arguments.data.parent
  draw_gains(groups, folder / "length.png")
  if ("sliding_window", True) in groups:  # what the others are held against
    recall = longest(lines(folder / "recall.jsonl"))
    draw_overview(groups, recall, folder / "overview.png")


if __name__ == "__main__":
  main()
