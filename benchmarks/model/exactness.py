"""Exactness: Trellis and Lattice with gradients by chunk or by token.

  python benchmarks/model/exactness.py --seeds=0,1,2 \
    --runs=exactness.jsonl --out=docs/results/exactness

Both memories with gradients at starts of chunks of 16 and of 64, and at every
token; all else is equal: parameters, rows and their order. On text, the
quickstart's model for a few hundred updates; on recall, the model and the
protocol of `recall.py`. Each finished run is a line of <runs>; runs that are
there are not repeated. Prints tables of all lines and draws <out>.png;
`--report` does only that.
"""

import itertools
import json
import math
import os
import pathlib
import time
from typing import Any

import exactness_report
import jax
import numpy as np
import recall_training
import text_training
from absl import app, flags, logging

from memcomp.layers import lattice

GRADIENTS: dict[str, dict[str, Any]] = {
  "chunk 16": {"gradient_at": "chunk_start", "chunk_size": 16},
  "chunk 64": {"gradient_at": "chunk_start", "chunk_size": 64},
  "token": {"gradient_at": "token"},
}
"""Fields of the mixer's config, by name."""

_TASKS = flags.DEFINE_list("tasks", "text,recall", "Of text and recall.")
_MEMORIES = flags.DEFINE_list("memories", "trellis,lattice", "Which of them.")
_GRADIENTS = flags.DEFINE_list("gradients", list(GRADIENTS), "Which of them.")
_SEEDS = flags.DEFINE_list("seeds", "0,1,2", "Of parameters and rows.")
_TEXT_STEPS = flags.DEFINE_integer("text_steps", 200, "Updates on text.")
_RECALL_STEPS = flags.DEFINE_integer("recall_steps", 500, "On recall.")
_RUNS = flags.DEFINE_string("runs", "exactness.jsonl", "Finished runs.")
_OUT = flags.DEFINE_string("out", "exactness", "Figure's path, no suffix.")
_REPORT = flags.DEFINE_bool("report", False, "Only report on what is there.")


def train_on_text(
  memory: str, gradients: str, seeds: list[int], steps: int
) -> list[dict[str, Any]]:
  """Trains on the standard library's sources; what is kept of each run."""

  def config_of(seed):
    config = text_training.quickstart(seed, steps)
    if memory == "lattice":
      # As many slots as give the state of Trellis: 8,192 floats a layer.
      config.model.mixers["memory"] = lattice.LatticeConfig(
        heads=2, num_slots=64, convolve_value=True
      )
    for name, value in GRADIENTS[gradients].items():
      setattr(config.model.mixers["memory"], name, value)
    config.model.mixers["memory"].validate()
    return config

  return [
    {
      "bits_per_byte": trained.bits_per_byte,
      "scored_bytes": trained.scored_bytes,
      **_kept(trained.losses, trained.grad_norms),
    }
    for trained in text_training.train([config_of(seed) for seed in seeds])
  ]


def train_on_recall(
  memory: str, gradients: str, seeds: list[int], steps: int
) -> list[dict[str, Any]]:
  """Trains on mqar-fast; what is kept of each run."""
  task = recall_training.Task(
    pairs=(4, 8, 16),
    length=64,
    vocab_size=66,
    steps=steps,
    batch=32,
    learning_rate=5e-3,
  )
  config = recall_training.model_config(memory, task)
  if memory == "trellis":
    # The layer's own, as on text. Recall models learn surely with less.
    config.mixers["memory"].memory_std = 0.5
  for name, value in GRADIENTS[gradients].items():
    setattr(config.mixers["memory"], name, value)
  config.mixers["memory"].validate()
  return [
    {
      "accuracy": {str(n): x for n, x in trained.accuracy.items()},
      **_kept(trained.losses, trained.grad_norms),
    }
    for trained in recall_training.train(config, task, seeds)
  ]


def _kept(losses: np.ndarray, norms: np.ndarray) -> dict[str, Any]:
  """Loss curve in bits, and gradient norms before clipping.

  The norms without their first tenth: there, all start from large ones.
  """
  norms = norms[len(norms) // 10 :]
  width = max(1, len(losses) // 30)
  whole = losses[: len(losses) // width * width].reshape(-1, width)
  return {
    "curve": (whole.mean(1) / math.log(2)).round(4).tolist(),
    "curve_width": width,
    "gradient_max": float(norms.max()),
    "gradient_median": float(np.median(norms)),
    "gradient_over_10": int(np.sum(~(norms <= 10))),
  }


_TRAIN = {"text": train_on_text, "recall": train_on_recall}


def main(argv):
  """Trains what is missing, or reports on all there is."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  path = pathlib.Path(_RUNS.value)
  steps = {"text": _TEXT_STEPS.value, "recall": _RECALL_STEPS.value}
  seeds = list(map(int, _SEEDS.value))
  jobs = itertools.product(_MEMORIES.value, _TASKS.value, _GRADIENTS.value)
  for memory, task, gradients in jobs if not _REPORT.value else ():
    named = {
      "task": task,
      "memory": memory,
      "gradients": gradients,
      "steps": steps[task],
    }
    found = exactness_report.read(path)
    done = {run["seed"] for run in found if named.items() <= run.items()}
    missing = [seed for seed in seeds if seed not in done]
    if not missing:
      continue
    begun = time.monotonic()
    runs = _TRAIN[task](memory, gradients, missing, steps[task])
    seconds = round((time.monotonic() - begun) / len(missing), 1)
    with open(path, "a", encoding="utf-8") as file:
      for seed, run in zip(missing, runs, strict=True):
        run = named | {"seed": seed} | run | {"seconds": seconds}
        file.write(json.dumps(run) + "\n")
        logging.info("%s", {k: v for k, v in run.items() if k != "curve"})
  runs = [
    run
    for run in exactness_report.read(path)
    if run["steps"] == steps[run["task"]]
  ]
  print(exactness_report.tables(runs, list(GRADIENTS)))
  exactness_report.draw(runs, list(GRADIENTS), f"{_OUT.value}.png")
  print(
    f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax"
    f" {jax.__version__}"
  )


if __name__ == "__main__":
  app.run(main)
