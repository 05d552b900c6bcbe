"""Stability: the exact recurrence of Trellis trained under each switch.

  python benchmarks/model/stability.py --seeds=0,1,2,3,4 \
    --runs=stability.jsonl --out=docs/results/exact-training

The quickstart's model for a few hundred updates: bits per byte on a fixed
share of its validation files, and what the gradients were like. Each finished
run is a line of <runs>; runs that are there are not repeated, so a longer list
of variants or seeds goes on where the last call stopped. Prints a table of all
lines and draws <out>.png.
"""

import itertools
import json
import math
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np
import stability_report
import text_training
from absl import app, flags

_VARIANTS = flags.DEFINE_list("variants", None, "Names; default all.")
_SEEDS = flags.DEFINE_list("seeds", "0,1", "Of parameters and row order.")
_STEPS = flags.DEFINE_integer("steps", 300, "Updates of 1,024 bytes.")
_RUNS = flags.DEFINE_string("runs", "stability.jsonl", "Finished runs.")
_OUT = flags.DEFINE_string("out", "stability", "Figure's path, no suffix.")

BASE = "stale eps 1"
_TOKEN = {"gradient_at": "token"}
_L2 = _TOKEN | {"phi": "l2_silu"}
VARIANTS: dict[str, dict[str, Any]] = {
  BASE: {},
  "stale learned eps": {"learn_phi_eps": True},
  "stale rate .3": {"write_rate_init": 0.3},
  "stale l2_silu rate .3": {"phi": "l2_silu", "write_rate_init": 0.3},
  "token eps 1e-6": _TOKEN | {"phi_eps": 1e-6},
  "token eps .03": _TOKEN | {"phi_eps": 0.03},
  "token eps .3": _TOKEN | {"phi_eps": 0.3},
  "token eps 1": _TOKEN,
  "token eps 3": _TOKEN | {"phi_eps": 3.0},
  "token learned eps from .3": _TOKEN | {"learn_phi_eps": True, "phi_eps": 0.3},
  "token learned eps from 1": _TOKEN | {"learn_phi_eps": True},
  "token rate .3": _TOKEN | {"write_rate_init": 0.3},
  "token bound .1": _TOKEN | {"rate_bound": 0.1},
  "token eps .03 bound .3": _TOKEN | {"phi_eps": 0.03, "rate_bound": 0.3},
  "token qk": _TOKEN | {"normalize": "qk"},
  "token none": _TOKEN | {"normalize": "none"},
  "token none bound 1": _TOKEN | {"normalize": "none", "rate_bound": 1.0},
  "token l2_silu": _L2,
  "token l2_silu rate .3": _L2 | {"write_rate_init": 0.3},
  "token l2_silu rate 1": _L2
  | {"write_rate_init": 1.0, "write_rate_scale": 4.0},
  "token l2 rate .3": _TOKEN | {"phi": "l2", "write_rate_init": 0.3},
}
"""Fields of TrellisConfig that differ from the quickstart's in chunks of 16."""


def train(variant: str, seeds: list[int], steps: int) -> list[dict[str, Any]]:
  """Trains some seeds of a variant; what is kept of each run."""

  def config_of(seed):
    config = text_training.quickstart(seed, steps)
    for name, value in ({"chunk_size": 16} | VARIANTS[variant]).items():
      setattr(config.model.mixers["memory"], name, value)
    config.model.mixers["memory"].validate()
    return config

  begun = time.monotonic()
  runs = text_training.train([config_of(seed) for seed in seeds])
  seconds = (time.monotonic() - begun) / len(seeds)
  return [
    {
      "variant": variant,
      "seed": seed,
      "steps": steps,
      "bits_per_byte": run.bits_per_byte,
      **_gradients(run.grad_norms, run.skipped),
      "phi_eps": _learned(run.params),
      "curve": [
        round(float(x), 4)
        for x in run.losses.reshape(-1, 10).mean(1) / math.log(2)
      ],
      "scored_bytes": run.scored_bytes,
      "seconds": round(seconds, 1),
    }
    for seed, run in zip(seeds, runs, strict=True)
  ]


def _gradients(norms: np.ndarray, skipped: int) -> dict[str, Any]:
  """What is kept of a run's gradient norms, before clipping.

  Without its first tenth: there, all start from norms of 10 to 30.
  """
  norms = norms[len(norms) // 10 :]
  finite = norms[np.isfinite(norms)]
  return {
    "gradient_max": float(finite.max()),
    "gradient_median": float(np.median(finite)),
    "gradient_over_10": int(np.sum(~(norms <= 10))),
    "skipped": skipped,
  }


def _learned(params: Any) -> list[float] | None:
  """Learned eps of one run, layer by layer and head by head; None if not."""
  found = [
    np.exp(x).round(4).ravel().tolist()
    for path, x in jax.tree_util.tree_leaves_with_path(params)
    if "log_phi_eps" in jax.tree_util.keystr(path)
  ]
  return list(itertools.chain(*found)) or None


def main(argv):
  """Trains what is missing and reports on all there is."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  runs = pathlib.Path(_RUNS.value)
  variants = _VARIANTS.value or list(VARIANTS)
  if unknown := set(variants) - set(VARIANTS):
    raise app.UsageError(
      f"unknown variants {sorted(unknown)}; there are {', '.join(VARIANTS)}"
    )
  for variant in variants:
    done = {
      run["seed"]
      for run in stability_report.read(runs, _STEPS.value)
      if run["variant"] == variant
    }
    missing = [s for s in map(int, _SEEDS.value) if s not in done]
    if not missing:
      continue
    with open(runs, "a", encoding="utf-8") as file:
      for run in train(variant, missing, _STEPS.value):
        file.write(json.dumps(run) + "\n")
  found = stability_report.read(runs, _STEPS.value)
  print(stability_report.table(found, list(VARIANTS), BASE))
  stability_report.draw(found, list(VARIANTS), f"{_OUT.value}.png")
  print(
    f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax"
    f" {jax.__version__}"
  )


if __name__ == "__main__":
  app.run(main)
