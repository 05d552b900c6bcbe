"""Recall: small decoders learn MQAR; accuracy against pairs, per memory.

  python benchmarks/model/recall.py --mixers=trellis,softmax_attention \
    --seeds=2 --out=docs/results/recall

Two layers of d_model 64, trained on rows of mqar-fast (`recall_training`):
short rows of the fewest pairs first, then all numbers of pairs in turn.
Accuracy on fresh rows, per number of pairs. Writes <out>.json, <out>.md and
<out>.png. More pairs, tokens or ids (the common size is --pairs=4,8,16,32
--length=128 --vocab=256) need many more updates.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import recall_training
from absl import app, flags

from memcomp.models import registry

_MIXERS = flags.DEFINE_list("mixers", None, "Mixers; default all there are.")
_PAIRS = flags.DEFINE_list("pairs", "4,8,16", "Numbers of pairs.")
_LENGTH = flags.DEFINE_integer("length", 64, "Tokens a row.")
_VOCAB = flags.DEFINE_integer("vocab", 66, "Token ids.")
_STEPS = flags.DEFINE_integer("steps", 500, "Updates.")
_BATCH = flags.DEFINE_integer("batch", 32, "Rows an update.")
_RATE = flags.DEFINE_float("learning_rate", 5e-3, "Peak learning rate.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each mixer.")
_OUT = flags.DEFINE_string("out", "recall", "Path of the results, no suffix.")

Task = recall_training.Task


def measure(mixer: str, task: Task, seeds: int) -> dict[str, Any]:
  """Trains `seeds` times; one line of results."""
  config, begun = recall_training.model_config(mixer, task), time.monotonic()
  runs = recall_training.train(config, task, list(range(seeds)))
  return {
    "mixer": mixer,
    "state_floats": config.mixer.state_floats(task.length),
    "seconds": round((time.monotonic() - begun) / seeds, 1),
    "accuracy": {n: [run.accuracy[n] for run in runs] for n in task.pairs},
  }


def table(task: Task, results: list[dict[str, Any]]) -> str:
  """A table in markdown: means over seeds, and from the worst to the best."""
  lines = [
    "| memory | floats of state a layer | "
    + " | ".join(f"{n} pairs" for n in task.pairs)
    + " |",
    "|---" * (2 + len(task.pairs)) + "|",
  ]
  for row in results:
    cells = [row["mixer"], f"{row['state_floats']:,}"]
    for n in task.pairs:
      found = row["accuracy"][n]
      spread = f" ({min(found):.3f}-{max(found):.3f})" * (len(found) > 1)
      cells.append(f"{np.mean(found):.3f}{spread}")
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines) + "\n"


def report(record: dict[str, Any]) -> str:
  """What was measured, how and where, in markdown."""
  task = Task(**record["task"])
  return f"""# Recall: accuracy on mqar-fast against key-value pairs

{table(task, record["results"])}
![accuracy against pairs]({record["figure"]})

Two layers of d_model 64 and a convolution of four taps on the embeddings, one
model for all numbers of pairs, the fewest first: {task.steps:,} updates of
{task.batch} rows of {task.length} tokens (vocabulary {task.vocab_size}),
{record["seeds"]} seed(s).
Accuracy on {recall_training.FRESH_ROWS} fresh rows each; chance is
{2 / task.vocab_size:.3f}.

    {record["command"]}

{record["machine"]}
"""


def draw(task: Task, results: list[dict[str, Any]], path: str) -> None:
  """Accuracy against pairs, one line per memory; bars from worst to best."""
  try:
    from matplotlib import figure
  except ImportError:
    print(
      "no figure: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
    return
  canvas = figure.Figure(figsize=(6, 4), layout="constrained")
  axes = canvas.subplots()
  for row in results:
    found = np.array([row["accuracy"][n] for n in task.pairs])
    mean = found.mean(axis=1)
    axes.errorbar(
      task.pairs,
      mean,
      [mean - found.min(axis=1), found.max(axis=1) - mean],
      marker="o",
      capsize=3,
      label=f"{row['mixer']} ({row['state_floats']:,} floats a layer)",
    )
  axes.set_xscale("log", base=2)
  axes.set_xticks(task.pairs, [str(n) for n in task.pairs])
  axes.set(
    xlabel=f"key-value pairs in {task.length} tokens",
    ylabel="accuracy of recall",
    ylim=(0, 1.03),
  )
  axes.grid(alpha=0.3)
  axes.legend(fontsize="small")
  canvas.savefig(path, dpi=110)


def main(argv):
  """Trains every mixer and writes what it found."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  task = Task(
    pairs=tuple(sorted(int(n) for n in _PAIRS.value)),
    length=_LENGTH.value,
    vocab_size=_VOCAB.value,
    steps=_STEPS.value,
    batch=_BATCH.value,
    learning_rate=_RATE.value,
  )
  out = pathlib.Path(_OUT.value)
  results = []
  for mixer in _MIXERS.value or list(registry.MIXERS):
    results.append(measure(mixer, task, _SEEDS.value))
    print(json.dumps(results[-1]), flush=True)
  record = {
    "command": " ".join(["python", *sys.argv]),
    "machine": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax"
    f" {jax.__version__}",
    "figure": out.with_suffix(".png").name,
    "seeds": _SEEDS.value,
    "task": dataclasses.asdict(task),
    "results": results,
  }
  out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
  out.with_suffix(".md").write_text(report(record))
  draw(task, results, str(out.with_suffix(".png")))


if __name__ == "__main__":
  app.run(main)
