"""Recall beyond the trained length: Key-Value Means, its ablations, attention.

  python benchmarks/model/beyond.py --seeds=2 --runs=beyond.jsonl \
    --out=docs/results/beyond

Two layers of d_model 64, trained on mqar-fast in rows of 64 tokens
(`recall_training`) with values drawn anew between the questions, then asked for
pairs told at the start of rows of up to 512: what the paper asks of needles in
4k to 32k tokens, on a toy. Each finished model is a line of <runs>; models that
are there are not repeated. Prints a table of all lines and draws <out>.png;
`--report` does only that.
"""

import dataclasses
import json
import pathlib
import time
from typing import Any

import numpy as np
import recall_training
from absl import app, flags

_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each model.")
_PAIRS = flags.DEFINE_integer("pairs", 4, "Pairs a row.")
_STEPS = flags.DEFINE_integer("steps", 300, "Updates of 2,048 tokens.")
_RATE = flags.DEFINE_float("learning_rate", 5e-3, "Peak learning rate.")
_MODELS = flags.DEFINE_list("models", None, "Which; default all there are.")
_RUNS = flags.DEFINE_string("runs", "beyond.jsonl", "Finished models.")
_OUT = flags.DEFINE_string("out", "beyond", "Figure's path, no suffix.")
_REPORT = flags.DEFINE_bool("report", False, "Only report on what is there.")

LENGTHS = (64, 128, 256, 512)
Run = dict[str, Any]

_KVM, _SOFTMAX = "key_value_means", "softmax_attention"
_POWER = {"budget": "power", "budget_scale": 2.0}

# name: mixer, fields that differ
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  "16 rows": (_KVM, {}),
  "2 sqrt(T) rows": (_KVM, _POWER | {"budget_rows": 1}),
  "16 or 2 sqrt(T) rows": (_KVM, _POWER | {"budget_rows": 16}),
  "no sink": (_KVM, {"sink_rows": 0}),
  "no temperatures": (_KVM, {"temperatures": False}),
  "no value radius": (_KVM, {"value_radius": False}),
  "no merge gate": (_KVM, {"merge_gate": False}),
  "appends gated too": (_KVM, {"gate_appends": True}),
  "softmax of all tokens": (_SOFTMAX, {}),
  "softmax of 16 tokens": (_SOFTMAX, {"window_size": 16}),
}


def measure(named: Run) -> Run:
  """Trains a model with all its seeds; one line of results."""
  mixer, fields = MODELS[named["model"]]
  task = recall_training.Task(
    pairs=(named["pairs"],),
    length=LENGTHS[0],
    vocab_size=LENGTHS[-1] + 2,
    steps=named["steps"],
    batch=32,
    learning_rate=named["learning_rate"],
  )
  longest = dataclasses.replace(task, length=LENGTHS[-1])
  config = recall_training.model_config(mixer, longest)
  for name, value in fields.items():
    setattr(config.mixers["memory"], name, value)
  config.mixers["memory"].validate()
  begun, seeds = time.monotonic(), list(range(named["seeds"]))
  runs = recall_training.train(config, task, seeds, LENGTHS, filler=True)
  return named | {
    "state_floats": [config.layer_mixers()[0].state_floats(n) for n in LENGTHS],
    "accuracy": [list(run.by_length.values()) for run in runs],
    "seconds": round((time.monotonic() - begun) / len(seeds), 1),
  }


def table(runs: list[Run]) -> str:
  """Accuracy by length: the mean, and each seed."""
  heads = " | ".join(f"{n} tokens" for n in LENGTHS)
  lines = [
    f"| model | floats of state at {LENGTHS[-1]} | {heads} |",
    "|---|---:" + "|---" * len(LENGTHS) + "|",
  ]
  for run in runs:
    by_length = np.array(run["accuracy"]).T
    cells = [run["model"], f"{run['state_floats'][-1]:,}"]
    cells += [
      f"{found.mean():.3f} ({', '.join(f'{x:.3f}' for x in found)})"
      for found in by_length
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def draw(runs: list[Run], path: pathlib.Path) -> None:
  """Wrong answers by length: means over seeds, the worst and the best."""
  try:
    from matplotlib import figure
  except ImportError:
    print(
      "no figure: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
    return
  canvas = figure.Figure(figsize=(8, 5), layout="constrained")
  axes = canvas.subplots()
  for index, run in enumerate(runs):
    # Of half an answer at least: zero has no logarithm.
    least = 0.5 / (recall_training.FRESH_ROWS * run["pairs"])
    found = np.maximum(1 - np.array(run["accuracy"]), least)
    color, line = f"C{index}", ["-", "--"][run["model"].startswith("softmax")]
    axes.plot(
      LENGTHS,
      found.mean(0),
      color=color,
      linestyle=line,
      marker="o",
      label=run["model"],
    )
    axes.fill_between(
      LENGTHS, found.min(0), found.max(0), color=color, alpha=0.12
    )
  axes.set_xscale("log", base=2)
  axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
  axes.set_yscale("log")
  axes.set(
    xlabel=f"tokens a row; trained on {LENGTHS[0]}",
    ylabel="share of wrong answers",
    title=f"Key-Value Means: {runs[0]['pairs']} pairs told at the start",
  )
  axes.grid(alpha=0.3)
  canvas.legend(loc="outside right upper", fontsize="small")
  canvas.savefig(path, dpi=110)


def main(argv):
  """Trains what is missing and reports on what there is."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  path, out = pathlib.Path(_RUNS.value), pathlib.Path(_OUT.value)
  settings = {
    "pairs": _PAIRS.value,
    "steps": _STEPS.value,
    "learning_rate": _RATE.value,
    "seeds": _SEEDS.value,
  }
  lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
  runs = [
    run for run in map(json.loads, lines) if settings.items() <= run.items()
  ]
  names = _MODELS.value or list(MODELS)
  unknown = set(names) - set(MODELS)
  if unknown:
    raise app.UsageError(
      f"no model {sorted(unknown)}; there are: {', '.join(MODELS)}"
    )
  done = {run["model"] for run in runs}
  for name in [] if _REPORT.value else names:
    if name in done:
      continue
    runs.append(measure({"model": name} | settings))
    print(json.dumps(runs[-1]), flush=True)
    with path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(runs[-1]) + "\n")
  if not runs:
    raise SystemExit(f"nothing of these settings in {path}")
  order = list(MODELS)
  runs.sort(key=lambda run: order.index(run["model"]))
  print(table(runs))
  draw(runs, out.with_suffix(".png"))


if __name__ == "__main__":
  app.run(main)
