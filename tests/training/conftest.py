import subprocess

import leaky
import pytest
import training_cases

from memcomp.models import decoder


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
