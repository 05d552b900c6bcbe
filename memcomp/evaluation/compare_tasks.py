"""Runs that were trained on a task, side by side: accuracy by slice."""

import json
import pathlib
from typing import Any

import numpy as np

from memcomp.evaluation import panels

_SLICE = {"recall": ("gap",), "mqar": ("length", "pairs")}
"""Fields that tell the slices of a task apart."""


def compare(folder: pathlib.Path) -> dict[str, Any] | None:
  """Reads the finished runs in a folder, as `train.py --each` leaves them.

  Returns:
    None if there are none of a task. `slices`, the names of all; `rows`, by
    name: `name`, `seeds`, `state_bytes` at the trained length, and by slice
    `accuracy` and its deviation over seeds `accuracy_std`, None where a run
    has no such slice.
  """
  runs: dict[str, list[dict[str, Any]]] = {}
  files = f"{result['task']}*-step{result['step']}.json"
  for path in sorted(folder.glob(files)):
    for one in json.loads(path.read_text())["slices"]:
      accuracy.setdefault(tuple(one[x] for x in fields), one["accuracy"])
  return accuracy
