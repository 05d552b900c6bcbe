"""Recall: small decoders learn MQAR; accuracy against pairs and state.

  python benchmarks/model/recall.py --seeds=2 --head_dims=16,32 \
    --runs=recall.jsonl --out=docs/results/recall

Two layers of d_model 64, trained on rows of mqar-fast (`recall_training`):
short rows of the fewest pairs first, then all numbers of pairs in turn.
Accuracy on fresh rows, per number of pairs. Each finished model is a line of
<runs>; models that are there are not repeated. Writes <out>.md and <out>.png,
of each mixer and size the run of the most updates (some have not learned after
500; give them --steps=1500); `--report` does only that. More pairs, tokens or
ids (the common size is --pairs=4,8,16,32 --length=128 --vocab=256) need many
more updates.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
import recall_training
from absl import app, flags

from memcomp.layers import registry
from memcomp.training import optimizer

_MIXERS = flags.DEFINE_list("mixers", None, "Mixers; default all there are.")
_HEAD_DIMS = flags.DEFINE_list(
  "head_dims", "32", "Sizes: features of a head; slots and windows go along."
)
_PAIRS = flags.DEFINE_list("pairs", "4,8,16", "Numbers of pairs.")
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens a row.")
_VOCAB = flags.DEFINE_integer("vocab", 66, "Token ids.")
_STEPS = flags.DEFINE_integer("steps", 500, "Updates.")
_BATCH = flags.DEFINE_integer("batch", 32, "Rows an update.")
_RATE = flags.DEFINE_float("learning_rate", 5e-3, "Peak learning rate.")
_OPTIMIZER = flags.DEFINE_enum(
  "optimizer", "adamw", optimizer.NAMES, "Of the matrices of layers."
)
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each model.")
_OPTIONS = flags.DEFINE_string(
  "options", "{}", "Options of the mixers that are not the usual, as JSON."
)
_RUNS = flags.DEFINE_string("runs", "recall.jsonl", "Finished models.")
_OUT = flags.DEFINE_string("out", "recall", "Path of the results, no suffix.")
_REPORT = flags.DEFINE_bool("report", False, "Only report on what is there.")

_MEMORIES = {
  "trellis": "tab:red",
  "lattice": "tab:blue",
  "key_value_means": "tab:orange",
  "tensor_cache": "tab:green",
}
"""The memories that this project is about, drawn thick; their colours."""
_COLOURS = [
  f"tab:{x}" for x in ("purple", "brown", "pink", "gray", "olive", "cyan")
]

Task = recall_training.Task
Run = dict[str, Any]


def measure(named: Run, task: Task) -> Run:
  """Trains what `named` says with all its seeds; one line of results."""
  config = recall_training.model_config(named["mixer"], task, named["head_dim"])
  memory = dataclasses.replace(config.mixers["memory"], **named["options"])
  config = dataclasses.replace(config, mixers={"memory": memory})
  begun, seeds = time.monotonic(), named["seeds"]
  runs = recall_training.train(config, task, list(range(seeds)))
  return named | {
    "state_floats": config.layer_mixers()[0].state_floats(task.length),
    "seconds": round((time.monotonic() - begun) / seeds, 1),
    "accuracy": {str(n): [run.accuracy[n] for run in runs] for n in task.pairs},
    "machine": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax"
    f" {jax.__version__}",
  }


def table(task: Task, runs: list[Run]) -> str:
  """A table in markdown: means over seeds, and from the worst to the best."""
  lines = [
    "| mixer | head_dim | floats of state a layer | updates | "
    + " | ".join(f"{n} pairs" for n in task.pairs)
    + " |",
    "|---|---:|---:|---:" + "|---" * len(task.pairs) + "|",
  ]
  for run in runs:
    changed = "".join(f", {k}={v}" for k, v in run["options"].items())
    name = run["mixer"] + changed
    cells = [name, str(run["head_dim"]), f"{run['state_floats']:,}"]
    cells.append(f"{run['task']['steps']:,}")
    for n in task.pairs:
      found = run["accuracy"][str(n)]
      spread = f" ({min(found):.3f}-{max(found):.3f})" * (len(found) > 1)
      cells.append(f"{np.mean(found):.3f}{spread}")
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines) + "\n"


def draw(task: Task, runs: list[Run], path: pathlib.Path) -> None:
  """Accuracy against state, a panel for each of the two largest numbers.

  Lines go through the best seed of each size, thin bars down to the worst:
  whether a seed learns the task at all is not what a state can hold.
  """
  try:
    from matplotlib import figure
  except ImportError:
    print(
      "no figure: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
    return
  canvas = figure.Figure(figsize=(11, 5.2), layout="constrained")
  panels = canvas.subplots(1, len(task.pairs[-2:]), sharey=True, squeeze=False)
  runs = [run for run in runs if not run["options"]]
  if not runs:
    return
  mixers = dict.fromkeys(run["mixer"] for run in runs)
  fewest = min(run["task"]["steps"] for run in runs)
  names = [x for x in _MEMORIES if x in mixers]
  names += sorted(mixers.keys() - _MEMORIES.keys())
  lines = itertools.product(["--", ":"], zip(_COLOURS, "sD^vPX", strict=True))
  baselines = itertools.cycle(lines)
  for name in names:
    if name in _MEMORIES:
      style = {"color": _MEMORIES[name], "linewidth": 2.6, "marker": "o"}
      style |= {"zorder": 3}
    else:
      line, (color, marker) = next(baselines)
      style = {"linestyle": line, "color": color, "marker": marker}
      style |= {"linewidth": 1.2, "markersize": 5}
    sizes = sorted(
      (run for run in runs if run["mixer"] == name),
      key=lambda run: run["state_floats"],
    )
    states = [run["state_floats"] for run in sizes]
    updates = max(run["task"]["steps"] for run in sizes)
    longer = f" ({updates:,} updates)" * (updates > fewest)
    for axes, n in zip(panels[0], task.pairs[-2:], strict=True):
      found = [run["accuracy"][str(n)] for run in sizes]
      best, worst = ([of(x) for x in found] for of in (max, min))
      axes.plot(states, best, label=name + longer, **style)
      axes.vlines(states, worst, best, color=style["color"], linewidth=0.8)
  for axes, n in zip(panels[0], task.pairs[-2:], strict=True):
    axes.set_xscale("log", base=2)
    axes.set(
      xlabel="floats of state a layer",
      title=f"{n} key-value pairs in {task.length} tokens",
    )
    axes.set_ylim(0, 1.03)
    axes.grid(alpha=0.3)
  panels[0, 0].set_ylabel("accuracy of recall, best seed")
  handles = panels[0, 0].get_legend_handles_labels()
  canvas.legend(*handles, loc="outside right center", fontsize="small")
  canvas.savefig(path, dpi=110)


def main(argv):
  """Trains what is missing and writes what there is."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  task = Task(
    pairs=tuple(sorted(int(n) for n in _PAIRS.value)),
    length=_LENGTH.value,
    vocab_size=_VOCAB.value,
    steps=_STEPS.value,
    batch=_BATCH.value,
    learning_rate=_RATE.value,
    optimizer=_OPTIMIZER.value,
  )
  path, out = pathlib.Path(_RUNS.value), pathlib.Path(_OUT.value)
  of_task = json.loads(json.dumps(dataclasses.asdict(task)))
  runs = _read(path, of_task)
  mixers = _MIXERS.value or list(registry.MIXERS)
  sizes = [int(x) for x in _HEAD_DIMS.value]
  for mixer, size in [] if _REPORT.value else itertools.product(mixers, sizes):
    named = {"mixer": mixer, "head_dim": size, "seeds": _SEEDS.value}
    named["options"] = json.loads(_OPTIONS.value)
    if any((named | {"task": of_task}).items() <= run.items() for run in runs):
      continue
    runs.append(measure(named, task) | {"task": of_task})
    print(json.dumps(runs[-1]), flush=True)
    with path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(runs[-1]) + "\n")
  runs = _longest(runs)
  runs.sort(key=lambda run: (-_mean(run, task), run["mixer"], run["head_dim"]))
  print(table(task, runs))
  out.with_suffix(".md").write_text(table(task, runs))
  draw(task, runs, out.with_suffix(".png"))


def _mean(run: Run, task: Task) -> float:
  """Of the accuracy at most pairs."""
  return float(np.mean(run["accuracy"][str(task.pairs[-1])]))


def _read(path: pathlib.Path, of_task: Run) -> list[Run]:
  """Finished models of the same task, after however many updates."""
  lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
  runs = [{"options": {}} | json.loads(line) for line in lines]
  return [
    run for run in runs if run["task"] | {"steps": 0} == of_task | {"steps": 0}
  ]


def _longest(runs: list[Run]) -> list[Run]:
  """Of each mixer, options and size the run of the most updates."""
  found: dict[tuple[str, str, int], Run] = {}
  for run in sorted(runs, key=lambda run: run["task"]["steps"]):
    found[run["mixer"], str(run["options"]), run["head_dim"]] = run
  return list(found.values())


if __name__ == "__main__":
  app.run(main)
