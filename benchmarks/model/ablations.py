"""Ablations: rows of Trellis's table 2 and Lattice's tables 2 and 4, on a toy.

  python benchmarks/model/ablations.py --seeds=0,1 \
    --runs=ablations.jsonl --out=docs/results/ablations

The quickstart's model for 200 updates on the standard library's sources, with
one field of the mixer changed, some with other write rates too: a phi, or an
update, wants its own. Each finished run is a line of <runs>; runs that are
there are not repeated. Prints tables of all lines and draws <out>.png;
`--report` does only that.
"""

import json
import math
import os
import pathlib
import time
from typing import Any

import exactness_report
import jax
import numpy as np
import text_training
from absl import app, flags, logging

from memcomp.layers import lattice

Run = dict[str, Any]

_NO_GATE = {"forget_gate": False}

# name: (fields that differ from the base, the paper's perplexity or None)
TRELLIS: dict[str, tuple[dict[str, Any], float | None]] = {
  "base: phi, f LN-SiLU, 32 slots, chunks of 16": ({}, 10.87),
  "no forget gate": (_NO_GATE, 11.28),
  "f = L2-SiLU": ({"read_activation": "l2_silu"}, 10.98),
  "f = softmax": ({"read_activation": "softmax"}, 11.29),
  "phi = identity": ({"phi": "identity"}, 11.65),
  "phi = identity, rate .1": (
    {"phi": "identity", "write_rate_init": 0.1},
    11.65,
  ),
  "phi = identity, rate .3": (
    {"phi": "identity", "write_rate_init": 0.3},
    11.65,
  ),
  "phi = LN-SiLU, rate .1": ({"write_rate_init": 0.1}, None),
  "phi = LN-SiLU, rate .3": ({"write_rate_init": 0.3}, None),
  "phi = L2-SiLU": ({"phi": "l2_silu"}, None),
  "phi = L2-SiLU, rate .3": (
    {"phi": "l2_silu", "write_rate_init": 0.3},
    None,
  ),
  "phi = SiLU, rate .3": ({"phi": "silu", "write_rate_init": 0.3}, None),
  "half the slots": ({"num_slots": 16}, 11.14),
  "twice the slots": ({"num_slots": 64}, 10.87),
  "gradients per token (b = 1)": ({"gradient_at": "token"}, 10.75),
}

LATTICE: dict[str, tuple[dict[str, Any], float | None]] = {
  "base: decoding, normalised, forget gate, 64 slots": ({}, 10.94),
  "no forget gate": (_NO_GATE, 10.94),
  "orthogonal alone": (_NO_GATE | {"update": "orthogonal"}, 11.26),
  "orthogonal alone, rate .1": (
    _NO_GATE | {"update": "orthogonal", "write_rate_init": 0.1},
    11.26,
  ),
  "delta rule": (_NO_GATE | {"update": "delta"}, 11.62),
  "delta rule, rate .1": (
    _NO_GATE | {"update": "delta", "write_rate_init": 0.1},
    11.62,
  ),
  "delta rule, rate .9": (
    _NO_GATE | {"update": "delta", "write_rate_init": 0.9},
    11.62,
  ),
  "base, rate .1": ({"write_rate_init": 0.1}, None),
  "encoding": ({"objective": "encoding"}, None),
  "encoding, rate .03": (
    {"objective": "encoding", "write_rate_init": 0.03},
    None,
  ),
  "base, values of norm 1": ({"normalize": "qkv"}, None),
  "encoding, values of norm 1": (
    {"objective": "encoding", "normalize": "qkv"},
    None,
  ),
  "similarity": ({"objective": "similarity"}, None),
  "half the slots": ({"num_slots": 32}, None),
  "a quarter of the slots": ({"num_slots": 16}, None),
}

LADDERS = {"trellis": TRELLIS, "lattice": LATTICE}

_MEMORIES = flags.DEFINE_list("memories", list(LADDERS), "Which of them.")
_SEEDS = flags.DEFINE_list("seeds", "0,1", "Of parameters and rows.")
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of 1,024 bytes.")
_RUNS = flags.DEFINE_string("runs", "ablations.jsonl", "Finished runs.")
_OUT = flags.DEFINE_string("out", "ablations", "Figure's path, no suffix.")
_REPORT = flags.DEFINE_bool("report", False, "Only report on what is there.")


def train(memory: str, variant: str, seeds: list[int], steps: int) -> list[Run]:
  """Trains some seeds of a variant; what is kept of each run."""
  fields, _ = LADDERS[memory][variant]

  def config_of(seed):
    config = text_training.quickstart(seed, steps)
    config.model.mixers["memory"].chunk_size = 16
    if memory == "lattice":
      config.model.mixers["memory"] = lattice.LatticeConfig(
        heads=2, convolve_value=True, gradient_at="token"
      )
    for name, value in fields.items():
      setattr(config.model.mixers["memory"], name, value)
    config.model.mixers["memory"].validate()
    return config

  begun = time.monotonic()
  runs = text_training.train([config_of(seed) for seed in seeds])
  seconds = round((time.monotonic() - begun) / len(seeds), 1)
  return [
    {
      "memory": memory,
      "variant": variant,
      "steps": steps,
      "seed": seed,
      "bits_per_byte": run.bits_per_byte,
      "skipped": run.skipped,
      "gradient_max": float(np.nanmax(run.grad_norms[steps // 10 :])),
      "seconds": seconds,
    }
    for seed, run in zip(seeds, runs, strict=True)
  ]


def scores(runs: list[Run], memory: str) -> dict[str, dict[int, float]]:
  """Bits per byte by seed of each variant that was run."""
  found = {
    variant: {
      run["seed"]: run["bits_per_byte"]
      for run in runs
      if (run["memory"], run["variant"]) == (memory, variant)
    }
    for variant in LADDERS[memory]
  }
  return {variant: by_seed for variant, by_seed in found.items() if by_seed}


def table(runs: list[Run], memory: str) -> str:
  """Each variant, its difference to the base seed by seed, and the paper's."""
  ladder, found = LADDERS[memory], scores(runs, memory)
  base, *_ = ladder
  lines = [
    f"| {memory} | bits per byte, by seed | less base | paper's perplexity |"
    " its log2 ratio to base | largest gradient | skipped |",
    "|---|---|---|---:|---:|---:|---:|",
  ]
  for variant, by_seed in found.items():
    rows = [
      run
      for run in runs
      if (run["memory"], run["variant"]) == (memory, variant)
    ]
    paper = ladder[variant][1]
    of_base = ladder[base][1]
    ratio = math.log2(paper / of_base) if paper and of_base else None
    cells = (
      variant,
      ", ".join(f"{x:.3f}" for _, x in sorted(by_seed.items())),
      ""
      if variant == base
      else exactness_report.difference(by_seed, found.get(base, {})),
      f"{paper:.2f}" if paper else "",
      f"{ratio:+.3f}" if ratio is not None and variant != base else "",
      f"{max(run['gradient_max'] for run in rows):.3g}",
      str(sum(run["skipped"] for run in rows)),
    )
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def draw(runs: list[Run], path: str) -> None:
  """Bits per byte of each variant, a point a seed."""
  try:
    from matplotlib import figure
  except ImportError:
    print(
      "no figure: matplotlib is not installed (pip install 'memcomp[plot]')"
    )
    return
  ladders = {memory: scores(runs, memory) for memory in LADDERS}
  ladders = {memory: found for memory, found in ladders.items() if found}
  if not ladders:
    return
  canvas = figure.Figure(figsize=(7 * len(ladders), 5), layout="constrained")
  panels = canvas.subplots(1, len(ladders), squeeze=False)[0]
  for axes, (memory, found) in zip(panels, ladders.items(), strict=True):
    for place, by_seed in enumerate(found.values()):
      values = list(by_seed.values())
      axes.plot(values, [place] * len(values), "o", color="tab:blue", ms=5)
      axes.plot(np.mean(values), place, "|", color="black", ms=14)
    base = np.mean(list(next(iter(found.values())).values()))
    axes.axvline(base, color="gray", lw=0.8)
    axes.set_yticks(range(len(found)), list(found), fontsize="small")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.set(xlabel="bits per byte, lower is better", title=memory)
  canvas.savefig(path, dpi=110)


def main(argv):
  """Trains what is missing and reports on all there is."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  path, steps = pathlib.Path(_RUNS.value), _STEPS.value
  if unknown := set(_MEMORIES.value) - set(LADDERS):
    raise app.UsageError(
      f"unknown memories {sorted(unknown)}; there are {', '.join(LADDERS)}"
    )
  jobs = [(m, v) for m in _MEMORIES.value for v in LADDERS[m]]
  for memory, variant in [] if _REPORT.value else jobs:
    named = {"memory": memory, "variant": variant, "steps": steps}
    done = {
      run["seed"]
      for run in exactness_report.read(path)
      if named.items() <= run.items()
    }
    missing = [seed for seed in map(int, _SEEDS.value) if seed not in done]
    if not missing:
      continue
    with path.open("a", encoding="utf-8") as file:
      for run in train(memory, variant, missing, steps):
        file.write(json.dumps(run) + "\n")
        logging.info("%s", run)
  runs = [run for run in exactness_report.read(path) if run["steps"] == steps]
  for memory in dict.fromkeys(run["memory"] for run in runs):
    print(table(runs, memory))
  draw(runs, f"{_OUT.value}.png")
  print(
    f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax"
    f" {jax.__version__}"
  )


if __name__ == "__main__":
  app.run(main)
