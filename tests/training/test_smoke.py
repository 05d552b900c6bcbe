"""The smoke config of every mixer trains, evaluates itself and samples.

Trellis's is run by other tests.
"""

import importlib.util
import json

import pytest
import training_cases

from memcomp.layers import registry
from memcomp.training import run

_SPEC = importlib.util.spec_from_file_location(
  "smoke", training_cases.ROOT / "configs" / "smoke.py"
)
smoke = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(smoke)


# CI trains the quickstart, and other tests train others; half a minute each.
@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [name for name in registry.MIXERS if name != "trellis"]
)
def test_smoke(name, tmp_path, capsys):
  config = smoke.get_config(name)
  config.data.source = training_cases.write_text(tmp_path / "text")
  config.training.steps = 20
  config.training.log_every = 1
  config.evaluation.sample_tokens = 8
  assert run.run(config, tmp_path / "run") == 0
  records = [
    json.loads(line)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  ]
  losses = [r["loss"] for r in records if "loss" in r]
  assert losses[-1] < losses[0] - 1
  out = capsys.readouterr().out
  assert "bits per byte" in out
