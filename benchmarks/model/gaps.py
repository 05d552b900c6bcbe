"""Tables of recall over gaps, from runs of `configs/recall.py`.

  python train.py --config=configs/recall.py --each=all --seeds=3 --workdir=RUNS
  python benchmarks/model/gaps.py --runs=RUNS

Reads what each run's own evaluation wrote, `RUNS/METHOD-KIND-SEED/eval`; means
over the seeds that there are. Prints, for each kind of row that was trained on
(a gap, longGAP, multistore), each method's accuracy at its gap and at the
others. Methods that are not trained yet are left out.
"""

import collections
import json
import pathlib
import re

import numpy as np
from absl import app, flags

_RUNS = flags.DEFINE_string("runs", None, "Folder of the runs.", required=True)

Slices = dict[int, list[dict[str, float]]]
"""By gap of the question, of each seed."""


def read(folder: pathlib.Path) -> dict[str, dict[str, Slices]]:
  """What was evaluated, by trained kind, method and gap."""
  found = collections.defaultdict(dict)
  for path in sorted(folder.glob("*/eval/recall-step*.json")):
    named = re.fullmatch(r"(\w+)-(\w+)-\d+", path.parents[1].name)
    if not named:
      continue
    method, trained = named[1], named[2]
    slices = found[trained].setdefault(method, collections.defaultdict(list))
    for row in json.loads(path.read_text(encoding="utf-8"))["slices"]:
      slices[row["gap"]].append(row)
  return dict(sorted(found.items(), key=lambda x: (not _plain(x[0]), x[0])))


def _plain(kind: str) -> bool:
  """Whether its rows are of several episodes, of one pair."""
  return kind.isdecimal()


def _gap(kind: str) -> int:
  """That was trained on, as `configs/recall.py` has it."""
  found = re.search(r"\d+", kind)
  return int(found[0]) if found else 24


def _mean(rows: list[dict[str, float]], name: str) -> float:
  return float(np.mean([row[name] for row in rows]))


def table(trained: str, by_method: dict[str, Slices]) -> str:
  """Accuracy of each method at each gap, in markdown."""
  gaps = sorted({gap for slices in by_method.values() for gap in slices})
  lines = [
    f"| trained at {'gap ' * _plain(trained)}{trained} | state, bytes |"
    " nats there | seeds | " + " | ".join(map(str, gaps)) + " |",
    "|---|---:|---:|---:|" + "---:|" * len(gaps),
  ]
  for method, slices in by_method.items():
    there = slices[_gap(trained)]
    cells = [
      method,
      f"{_mean(there, 'state_bytes'):,.0f}",
      f"{_mean(there, 'nats'):.3f}",
      str(len(there)),
      *(f"{_mean(slices[gap], 'accuracy'):.3f}" for gap in gaps),
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def main(argv):
  """Reports on all there is."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected: {' '.join(argv[1:])}")
  found = read(pathlib.Path(_RUNS.value))
  if not found:
    raise app.UsageError(f"{_RUNS.value} holds no evaluated run")
  for trained, by_method in found.items():
    print(table(trained, by_method))


if __name__ == "__main__":
  app.run(main)
