"""Every mixer learns to recall: two layers, four pairs in 32 tokens."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from memcomp.layers import registry
from memcomp.models import small

ROOT = pathlib.Path(__file__).parents[2]


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
      f"--runs={tmp_path / 'recall.jsonl'}",
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
  (line,) = (tmp_path / "recall.jsonl").read_text().splitlines()
  return json.loads(line)["accuracy"]["4"][0]


@pytest.mark.slow  # A minute each.
@pytest.mark.parametrize("mixer", registry.MIXERS)
def test_recall_is_learned(mixer, tmp_path):
  # Their losses rest at one pair in four for longer before they fall.
  longer = {"trellis": 500, "tensor_cache": 500}
  longer |= {"mamba2": 800, "two_pass_delta": 1400}
  steps = longer.get(mixer, 300)
  assert train(mixer, tmp_path, f"--steps={steps}") > 0.95


@pytest.mark.slow
def test_without_training_it_is_not(tmp_path):
  """Chance is 1 in 32: accuracy tells of what was learned."""
  found = train("softmax_attention", tmp_path, "--steps=1")
  assert found < 0.15
  # Nor is it trained a second time: there is still one line.
  assert train("softmax_attention", tmp_path, "--steps=1") == found


@pytest.mark.parametrize("mixer", registry.MIXERS)
def test_wider_heads_have_a_larger_state(mixer):
  sizes = {}
  for head_dim in (16, 32):
    config = small.recall_model(
      mixer, vocab_size=66, length=64, head_dim=head_dim
    )
    config.validate()
    sizes[head_dim] = config.layer_mixers()[0].state_floats(64)
  assert 0.2 < sizes[16] / sizes[32] < 0.6


def test_head_dim_is_checked():
  with pytest.raises(ValueError, match="head_dim=12 must be a multiple of 8"):
    small.recall_model("trellis", vocab_size=66, length=64, head_dim=12)
