"""Bits per byte by the length of rows that models were trained on.

  for n in 512 2048 8192; do
    python train.py --config=configs/compare.py --workdir=RUNS/$n \
      --each=trellis,mamba2,softmax_attention --config.data.sequence_length=$n \
      --config.training.batch_size=$((8192 / n)) --config.training.steps=200
  done
  python benchmarks/model/contexts.py --runs=RUNS --out=docs/results/contexts

The models of `configs/compare.py`, the same bytes an update whatever the
length; scored on all validation bytes in windows of the trained length. Reads
`RUNS/LENGTH/*/eval/results.json`, prints a table (means over the seeds that
there are), draws <out>.png.
"""

import collections
import json
import pathlib

import numpy as np
from absl import app, flags

from memcomp.evaluation import panels

_RUNS = flags.DEFINE_string("runs", None, "Folder of the runs.", required=True)
_OUT = flags.DEFINE_string("out", "contexts", "Figure's path, no suffix.")

Found = dict[str, dict[int, list[float]]]
"""Bits per byte of each seed, by model and length."""


def read(folder: pathlib.Path) -> Found:
  """What was evaluated in the windows that it was trained on."""
  found: Found = {}
  for path in sorted(folder.glob("*/*/eval/results.json")):
    result = json.loads(path.read_text(encoding="utf-8"))
    whole = result["perplexity"]["trained_length"]
    name = result["name"].removeprefix("compare-")
    of = found.setdefault(name, collections.defaultdict(list))
    of[whole["window"]].append(whole["bits_per_byte"])
  return found


def _mean(values: list[float]) -> float:
  return float(np.mean(values)) if values else float("nan")


def table(found: Found, lengths: list[int]) -> str:
  """Means by length, and what the longest is better by than the shortest."""
  lines = [
    f"| model | seeds | {' | '.join(f'{n:,}' for n in lengths)} | gain |",
    "|---|---:" + "|---:" * len(lengths) + "|---:|",
  ]
  for name, of in sorted(found.items(), key=lambda x: _mean(x[1][lengths[-1]])):
    bits = [_mean(of[n]) for n in lengths]
    cells = [name, str(len(of[lengths[0]])), *(f"{x:.3f}" for x in bits)]
    lines.append(f"| {' | '.join(cells)} | {bits[0] - bits[-1]:+.3f} |")
  return "\n".join(lines) + "\n"


def main(argv):
  """Reports on all there is."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  found = read(pathlib.Path(_RUNS.value))
  if not found:
    raise app.UsageError(f"{_RUNS.value} holds no evaluated run")
  lengths = sorted({n for of in found.values() for n in of})
  print(table(found, lengths))
  lines = {name: [_mean(of[n]) for n in lengths] for name, of in found.items()}
  print(
    panels.draw(
      lengths,
      [panels.Panel("bits per byte (lower is better)", lines)],
      xlabel="bytes a row, in training and scoring",
      title="the same models and bytes, rows of several lengths",
      path=pathlib.Path(f"{_OUT.value}.png"),
      names=[f"{n:,}" for n in lengths],
    )
  )


if __name__ == "__main__":
  app.run(main)
