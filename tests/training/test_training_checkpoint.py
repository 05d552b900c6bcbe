import asyncio
import contextlib
import errno
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import runs
from checkpoint_cases import MARKS, meta_of, restore, save
from orbax.checkpoint._src.path import temporary_paths

from memcomp import config as config_lib
from memcomp import errors, integrity, sharding
from memcomp.runs import load, workdir
from memcomp.training import checkpoint

pytestmark = MARKS


def test_a_state_comes_back_as_it_was(case):
  config, mesh, start, folder = case
  found = restore(folder, config, mesh)
  assert found.step == 3 and found.data == {"place": 3}
  want = start._replace(step=jnp.int32(3))
  assert jax.tree.structure(found.state) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, found.state, want)
  assert {x.sharding.mesh for x in jax.tree.leaves(found.state)} == {mesh}


def test_eight_devices_to_one_and_back(case, tmp_path):
  config, _, start, folder = case
  config.mesh = config_lib.MeshConfig(fsdp=4, tensor=2)
  eight = sharding.make_mesh(config.mesh)
  spread = restore(folder, config, eight).state
  table = spread.params["embedding"]
  assert table.addressable_shards[0].data.size == table.size // 8
  save(tmp_path / "eight", config, spread, 7)
  config.mesh = config_lib.MeshConfig()
  one = restore(tmp_path / "eight", config, sharding.make_mesh(config.mesh))
  assert len(one.state.params["embedding"].sharding.device_set) == 1
  for a, b in zip(
    jax.tree.leaves(one.state.params),
    jax.tree.leaves(start.params),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def test_the_newest_stay(tmp_path, case):
  config, _, start, _ = case
  save(tmp_path / "few", config, start, 1, 2, 3, 4, keep=2)
  folders = sorted(p.name for p in (tmp_path / "few/checkpoints").iterdir())
  assert folders == ["3", "4"]
  assert runs.latest_step(tmp_path / "few") == 4


def test_a_save_is_not_disturbed_by_the_steps_after_it(tmp_path, case):
  config, _, start, _ = case
  grow = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  manager = checkpoint.Checkpoints(tmp_path / "busy", keep=9)
  want, current = {}, start
  for step in range(1, 6):
    current = grow(current)
    want[step] = jax.device_get(current.params)
    manager.save(step, current, {}, meta_of(config))
    for _ in range(3):
      current = grow(current)
  manager.close()
  for step, params in want.items():
    found = load.read(tmp_path / "busy", step).params
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_check_comes_before_the_arrays(case):
  config, mesh, _, folder = case
  config.model.num_layers = 2

  def check(meta):
    raise errors.UserError(f"layers {meta['config']['model']['num_layers']}")

  with pytest.raises(errors.UserError, match="layers 1"):
    restore(folder, config, mesh, check)


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/3"])
def test_params_alone(case, where):
  _config, _, start, folder = case
  # The optimizer is not read.
  shutil.rmtree(folder / "checkpoints/3/state")
  (folder / "checkpoints/3" / integrity.MANIFEST).unlink()
  found = load.read(folder / where)
  assert found.meta["config"]["model"]["d_model"] == 32
  jax.tree.map(np.testing.assert_array_equal, found.params, start.params)
  config = workdir.config_of(found.meta["config"], str(folder))
  assert config.model.mixers["memory"].num_slots == 4
  module = load.module_of(config, found.params)
  hidden, _ = module.hidden(jnp.ones((1, 3), jnp.int32))
  assert module.logits(hidden).shape == (1, 3, 256)


def test_what_is_not_there(tmp_path, case):
  _, _, _, folder = case
  with pytest.raises(errors.UserError, match="no checkpoint in"):
    load.read(tmp_path / "no")
  with pytest.raises(errors.UserError, match="no checkpoint of step 9"):
    load.read(folder, 9)


def test_a_link_to_a_step(tmp_path, case):
  _, _, _, folder = case
  (tmp_path / "newest").symlink_to(folder / "checkpoints/3")
  assert load.locate(tmp_path / "newest") == (folder / "checkpoints", 3)
  (tmp_path / "run").mkdir()
  (tmp_path / "run/checkpoints").symlink_to(folder / "checkpoints")
  # The run is where the link is: it has the tokenizer and the results.
  assert load.locate(tmp_path / "run/checkpoints") == (
    tmp_path / "run/checkpoints",
    None,
  )


def test_a_config_of_another_version(case):
  config, _, start, folder = case
  saved = config_lib.to_dict(config)
  saved["model"]["wings"] = 2
  manager = checkpoint.Checkpoints(folder, keep=3)
  manager.save(4, start, {}, {"config": saved})
  manager.close()
  with pytest.raises(errors.UserError, match="wings"):
    load.read(folder)


def test_a_full_disk_keeps_the_checkpoints_before(small_disk, case):
  config, mesh, start, _ = case
  manager = checkpoint.Checkpoints(small_disk, keep=2)
  saved = 0
  with pytest.raises(errors.UserError) as error:
    for step in range(1, 9):
      if step > 1:
        # Something else takes the space, or what is left of it.
        with contextlib.suppress(OSError):
          (small_disk / f"other{step}").write_bytes(b"x" * 60_000)
      manager.save(step, start, {"place": step}, meta_of(config))
      manager.wait()
      saved = step
  message = str(error.value)
  assert "No space left on device; free some space" in message
  assert "\n" not in message and saved >= 1
  for path in small_disk.glob("other*"):
    path.unlink()
  # The save that failed may be whole: without room only for its checksums.
  found = restore(small_disk, config, mesh)
  assert found.step in (saved, saved + 1) and found.data == {
    "place": found.step
  }
  jax.tree.map(np.testing.assert_array_equal, found.state, start)


def _raise(number):
  def failing(*args, **kwargs):
    raise OSError(number, os.strerror(number), "somewhere")

  return failing


def _until_told(manager):
  for _ in range(1000):
    manager.poll()
    threading.Event().wait(0.01)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_an_error_in_the_background_comes_up_at_a_poll(
  case, monkeypatch, number
):
  config, mesh, start, folder = case
  manager = checkpoint.Checkpoints(folder, keep=3)
  with monkeypatch.context() as patch:
    patch.setattr(integrity, "write", _raise(number))
    manager.save(4, start, {}, meta_of(config))
    with pytest.raises(errors.UserError, match=os.strerror(number)):
      _until_told(manager)
  manager.close()
  assert restore(folder, config, mesh).step == 4


def test_no_permission_to_save(case, monkeypatch):
  # Tests may run as root, whom no permission bit stops.
  config, _, start, folder = case
  manager = checkpoint.Checkpoints(folder, keep=3)
  monkeypatch.setattr(ocp.CheckpointManager, "save", _raise(errno.EACCES))
  with pytest.raises(errors.UserError, match="Permission denied; change"):
    manager.save(4, start, {}, meta_of(config))
  manager.close()
  assert runs.latest_step(folder) == 3


@pytest.mark.parametrize("error", [None, PermissionError("not yours")])
def test_closing_waits_for_the_removal_of_remains(error, tmp_path, monkeypatch):
  """Else its thread prints a traceback at the end of a short process."""
  done = []

  async def slow(*args, **kwargs):
    await asyncio.sleep(0.3)
    done.append("removed")
    if error:
      raise error

  monkeypatch.setattr(temporary_paths, "cleanup_temporary_paths", slow)
  checkpoint.Checkpoints(tmp_path, keep=1).close()
  assert done == ["removed"]
