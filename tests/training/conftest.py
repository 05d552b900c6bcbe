import subprocess

import checkpoint_cases
import leaky
import pytest
import training_cases

from memcomp import sharding
from memcomp.models import decoder
from memcomp.training import state


@pytest.fixture
def text(tmp_path):
  return training_cases.write_text(tmp_path / "text")


@pytest.fixture
def leaky_model(monkeypatch):
  """A decoder that compiles in a second, where the memory is beside the point."""
  monkeypatch.setattr(decoder, "Decoder", leaky.Decoder)


@pytest.fixture
def small_disk(tmp_path):
  """A disk of 400 KB that a few checkpoints fill."""
  folder = tmp_path / "small"
  folder.mkdir()
  command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
  if subprocess.run(command, capture_output=True, check=False).returncode:
    pytest.skip("mounting a small disk is not permitted here")
  yield folder
  subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def case(tmp_path):
  """Makes (config, mesh, state, folder of checkpoints with steps 1, 2, 3)."""
  config = training_cases.tiny(carry_state=True)
  config.data.packing = "stream"
  mesh = sharding.make_mesh(config.mesh)
  start = state.initial_state(config, mesh)
  checkpoint_cases.save(tmp_path, config, start, 1, 2, 3)
  return config, mesh, start, tmp_path
