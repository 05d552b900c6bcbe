"""Every mixer learns to recall: two layers, four pairs in 32 tokens."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from memcomp.models import registry

ROOT = pathlib.Path(__file__).parents[2]

# A minute each: the others are left to `-m slow`.
QUICK = ("trellis",)


def train(mixer, tmp_path, *flags):
  # Trained rather than only compiled: XLA is to optimise here.
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
  }
  environment["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "kernels")]
  )
  done = subprocess.run(
    [
      sys.executable,
      ROOT / "benchmarks/model/recall.py",
      f"--mixers={mixer}",
      "--pairs=4",
      "--length=32",
      "--vocab=64",
      "--batch=64",
      f"--out={tmp_path / 'recall'}",
      *flags,
    ],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert (tmp_path / "recall.png").stat().st_size > 5000
  assert mixer in (tmp_path / "recall.md").read_text()
  (result,) = json.loads((tmp_path / "recall.json").read_text())["results"]
  return result["accuracy"]["4"][0]


@pytest.mark.parametrize(
  "mixer",
  [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in registry.MIXERS
  ],
)
def test_recall_is_learned(mixer, tmp_path):
  # Their losses rest at one pair in four for longer before they fall.
  longer = {"trellis": 500, "mamba2": 800, "two_pass_delta": 900}
  steps = longer.get(mixer, 300)
  assert train(mixer, tmp_path, f"--steps={steps}") > 0.95


def test_without_training_it_is_not(tmp_path):
  """Chance is 1 in 32: accuracy tells of what was learned."""
  assert train("softmax_attention", tmp_path, "--steps=1") < 0.15
