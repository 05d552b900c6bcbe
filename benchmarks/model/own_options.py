"""Two of each mixer's own options, tuned alike: `configs/compare.py` with Muon.

  python benchmarks/model/own_options.py --runs=runs/own_options [MIXER...]
  python benchmarks/model/rates.py --out=docs/results/rates.jsonl \
    runs/own_options/*
  python benchmarks/model/tables.py

Seed 0 runs a mixer as it stands in the comparison and with each of its two
changes. Other seeds run what was best with seed 0; with `--both` they also
run the mixer as it stands, to show whether the change is better in every seed.
Finished runs are left as they are and others go on, so the command can be given
again. Hardware: 2 CPU cores. Time: 2 to 5 minutes a run.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

from memcomp.models import comparison

_TRELLIS = (
  {"write_rate_init": 0.3, "convolve_value": True},
  {"memory_std": 0.1, "head_norm": True},
)
_LATTICE = {"convolve_value": True}, {"write_rate_init": 0.1}
_ATTENTION = {"normalize_key": "layer"}, {"token_shift": True}
_CODES = {"convolution_width": 4}, {"output_gate": True}
_LEARNED = {"convolution_width": 4}, {"forget_gate": True}
_TWO_HEADS = {"heads": 2, "key_dim": 64, "value_dim": 64}

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
  "trellis": _TRELLIS,
  "trellis_token": _TRELLIS,
  "trellis_hybrid": _TRELLIS,
  "lattice": _LATTICE,
  "lattice_token": _LATTICE,
  "key_value_means": ({"token_shift": True}, {"value_residual": "static"}),
  "tensor_cache": ({"token_shift": True}, {"rule": "delta"}),
  "softmax_attention": _ATTENTION,
  "gptalpha2": ({"normalize_key": "none"}, {"value_residual": "none"}),
  "sliding_window": _ATTENTION,
  "block_window": _ATTENTION,
  "streaming": _ATTENTION,
  "infini_attention": ({"window_size": 64}, {"token_shift": True}),
  "linear_attention": ({"output_norm": True}, {"decay": "token"}),
  "delta_net": (_TWO_HEADS, {"output_gate": True}),
  "gated_delta_net": (_TWO_HEADS, {"negative_eigenvalues": True}),
  "mamba2": ({"groups": 2}, {"heads": 8, "value_dim": 32}),
  "rwkv7": (
    {"value_residual": "none"},
    {"heads": 4, "key_dim": 32, "value_dim": 32},
  ),
  "slot_attention": _CODES,
  "bounded_memory": ({"convolution_width": 4}, {"num_slots": 64}),
  "ttt_linear": _LEARNED,
  "ttt_mlp": _LEARNED,
  "two_pass_delta": ({"write_rate_init": 0.1}, {"code_rate": False}),
  "ovq": ({"token_shift": True}, {"normalize_rows": True}),
}
"""Model name -> the two changes that are tried."""


def flags(mixer: str, change: dict[str, Any], seed: int) -> list[str]:
  """What `train.py` is given; the channel mixer keeps the parameter count."""
  model = comparison.language_model(mixer)
  memory = dataclasses.replace(model.mixers["memory"], **change)
  mixers = {**model.mixers, "memory": memory}
  mlp_dim = comparison.matched(
    dataclasses.replace(model, mixers=mixers), comparison.PARAMETERS
  ).mlp_dim
  options = {
    "model.mlp_dim": mlp_dim,
    "optimizer.name": "muon",
    "seed": seed,
    "data.seed": seed,
    "evaluation.lengths": 1,
    "evaluation.rows": 1,
    **{f"model.mixers.memory.{k}": v for k, v in change.items()},
  }
  return [
    f"--config=configs/compare.py:{mixer}",
    *(f"--config.{k}={v}" for k, v in options.items()),
  ]


def bits(folder: pathlib.Path) -> float | None:
  """Bits per byte of a run; None before it was evaluated."""
  results = folder / "eval/results.json"
  if not results.exists():
    return None
  found = json.loads(results.read_text("utf-8"))
  return found["perplexity"]["trained_length"]["bits_per_byte"]


def run(runs: pathlib.Path, mixer: str, index: int, seed: int) -> float | None:
  """Bits per byte of a mixer with its change `index`, 0 for none."""
  folder = runs / f"{mixer}-{index}-{seed}"
  if (done := bits(folder)) is not None:
    return done
  change = ({}, *OPTIONS[mixer])[index]
  command = [sys.executable, "train.py", f"--workdir={folder}"]
  code = subprocess.run([*command, *flags(mixer, change, seed)]).returncode
  return None if code else bits(folder)


def main() -> None:
  """Runs what is missing, mixer by mixer."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--runs", type=pathlib.Path, required=True)
  parser.add_argument("--seeds", type=int, default=4, help="seed 0 chooses")
  parser.add_argument("--both", action="store_true", help="also as it stands")
  parser.add_argument("mixers", nargs="*", default=[], metavar="MIXER")
  given = parser.parse_args()
  for mixer in given.mixers or OPTIONS:
    first = {i: run(given.runs, mixer, i, 0) for i in range(3)}
    reached = {i: value for i, value in first.items() if value is not None}
    if not reached:
      print(f"{mixer}: no run has ended", file=sys.stderr)
      continue
    best = min(reached, key=lambda i: reached[i])
    print(f"{mixer}: {reached}, best {best}", flush=True)
    for seed in range(1, given.seeds):
      run(given.runs, mixer, best, seed)
      if given.both:
        run(given.runs, mixer, 0, seed)


if __name__ == "__main__":
  main()
