"""How tiles were solved comes out of training, and nothing else changes."""

import io
import json

import numpy as np
import pytest
import training_cases

from memcomp.layers import lattice, trellis
from memcomp.training import metrics, run

MIXERS = {
  "trellis": trellis.TrellisConfig(
    heads=2, key_dim=8, value_dim=8, num_slots=4, convolution_width=0
  ),
  "lattice": lattice.LatticeConfig(
    heads=2, value_dim=8, num_slots=4, convolution_width=0
  ),
}


def records(tmp_path, name, **solver):
  config = training_cases.tiny(
    training_cases.write_text(tmp_path / "text"), steps=3, accumulation=2
  )
  config.model.mixers["memory"] = mixer = MIXERS[name]
  mixer.gradient_at = "token"
  for field, value in solver.items():
    setattr(mixer.solver, field, value)
  workdir = tmp_path / "-".join([name, *map(str, solver.values())])
  assert run.run(config, workdir) == 0
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_sweeps_are_counted(name, tmp_path):
  default = records(tmp_path, name)
  assert "sweeps" not in default[0]
  swept = records(tmp_path, name, method="sweeps", tile_time=8)
  for a, b in zip(default, swept, strict=True):
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-3)
    (sweeps,) = b["sweeps"]
    assert 1 < sweeps <= 9
    # A tile without a tolerance reached is counted, and exact all the same.
    (residual,), (unreached,) = b["residual"], b["unreached"]
    assert (residual <= 1e-6) == (unreached == 0)


def test_tiles_that_fell_back_are_told_of():
  fetched = {
    "loss": 1.0,
    "tokens": 8,
    "bytes": 8,
    "step": 2,
    "learning_rate": 0.1,
    "grad_norm": 1.0,
    "z_loss": 0.0,
    "memory_norms": np.zeros(2),
    "skipped": 0,
    "sweeps": np.array([3.5, 0.0]),
    "residual": np.array([0.5, 0.0]),
    "unreached": np.array([2.0, 1.0]),
  }
  record = metrics.record_of(fetched)
  assert record["sweeps"] == [3.5, 0] and record["residual"] == [0.5, 0]
  stream = io.StringIO()
  with metrics.StepProgress(4, stream) as progress:
    progress.show(record)
  assert "solved by substitution 3" in stream.getvalue()


@pytest.mark.parametrize(
  ("field", "value"), [("method", "guess"), ("tile_time", -1)]
)
@pytest.mark.parametrize("name", MIXERS)
def test_a_bad_solver_is_named(name, field, value):
  mixer = type(MIXERS[name])()
  setattr(mixer.solver, field, value)
  with pytest.raises(ValueError, match=f"solver.{field}="):
    mixer.validate()
