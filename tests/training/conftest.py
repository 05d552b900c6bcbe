import copy
import shutil
import subprocess

import checkpoint_cases
import jax
import leaky
import numpy as np
import pytest
import training_cases

from memcomp import sharding
from memcomp.models import decoder
from memcomp.training import plot, state


@pytest.fixture(autouse=True)
def _no_other_tests_steps():
  """What a test has changed is in no other test's step."""
  yield
  training_cases.STEPS.clear()


@pytest.fixture
def text(tmp_path):
  return training_cases.write_text(tmp_path / "text")


@pytest.fixture
def loss_figure():
  """The test looks at loss.png, which runs of `leaky_model` do not draw."""


@pytest.fixture
def leaky_model(monkeypatch, request):
  """A decoder that compiles in a second, where the memory is beside the point.

  Nor is the figure drawn, which takes as long as some of these runs.
  """
  monkeypatch.setattr(decoder, "Decoder", leaky.Decoder)
  if "loss_figure" not in request.fixturenames:
    monkeypatch.setattr(plot, "loss_curve", lambda workdir: "no figure")


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """What `case` copies."""
  folder = tmp_path_factory.mktemp("saved")
  config = training_cases.tiny(carry_state=True)
  config.data.packing = "stream"
  mesh = sharding.make_mesh(config.mesh)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(decoder, "Decoder", leaky.Decoder)
    start = state.initial_state(config, mesh)
    checkpoint_cases.save(folder, config, start, 1, 2, 3)
  return config, mesh, start, folder


@pytest.fixture
def case(saved, tmp_path):
  """Config, mesh, state, and a folder of checkpoints with steps 1, 2, 3.

  They are the test's own: tests write into the folder and donate the state.
  """
  config, mesh, start, folder = saved
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  own = jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), start)
  return copy.deepcopy(config), mesh, own, tmp_path
