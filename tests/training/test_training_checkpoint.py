import contextlib
import errno
import itertools
import json
import os
import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rotation
import training_cases

from memcomp import config as config_lib
from memcomp import errors, integrity, sharding
from memcomp.runs import load
from memcomp.training import checkpoint, state

pytestmark = [
  pytest.mark.usefixtures("leaky_model"),
  # A read that fails leaves tensorstore's callbacks without their event loop.
  pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def case(tmp_path):
  """Makes (config, mesh, state, folder of checkpoints with steps 1, 2, 3)."""
  config = training_cases.tiny(carry_state=True)
  config.data.packing = "stream"
  mesh = sharding.make_mesh(config.mesh)
  start = state.initial_state(config, mesh)
  _save(tmp_path, config, start, 1, 2, 3)
  return config, mesh, start, tmp_path


def _save(folder, config, start, *steps, keep=3):
  manager = checkpoint.Checkpoints(folder, keep=keep)
  for step in steps:
    numbered = start._replace(step=jnp.int32(step))
    manager.save(step, numbered, {"place": step}, _meta(config))
  manager.close()


def _meta(config):
  return {"config": config_lib.to_dict(config)}


def _restore(folder, config, mesh, check=lambda meta: None):
  manager = checkpoint.Checkpoints(folder, keep=3)
  try:
    return manager.restore(state.abstract_state(config, mesh), check)
  finally:
    manager.close()


def _largest(folder: pathlib.Path) -> pathlib.Path:
  files = [p for p in folder.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def _flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def _truncate(path):
  os.truncate(path, path.stat().st_size // 2)


def test_a_state_comes_back_as_it_was(case):
  config, mesh, start, folder = case
  found = _restore(folder, config, mesh)
  assert found.step == 3 and found.data == {"place": 3}
  want = start._replace(step=jnp.int32(3))
  assert jax.tree.structure(found.state) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, found.state, want)
  assert {x.sharding.mesh for x in jax.tree.leaves(found.state)} == {mesh}


def test_eight_devices_to_one_and_back(case, tmp_path):
  config, _, start, folder = case
  config.mesh = config_lib.MeshConfig(fsdp=4, tensor=2)
  eight = sharding.make_mesh(config.mesh)
  spread = _restore(folder, config, eight).state
  table = spread.params["embedding"]
  assert table.addressable_shards[0].data.size == table.size // 8
  _save(tmp_path / "eight", config, spread, 7)
  config.mesh = config_lib.MeshConfig()
  one = _restore(tmp_path / "eight", config, sharding.make_mesh(config.mesh))
  assert len(one.state.params["embedding"].sharding.device_set) == 1
  for a, b in zip(
    jax.tree.leaves(one.state.params),
    jax.tree.leaves(start.params),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def test_the_newest_stay(tmp_path, case):
  config, _, start, _ = case
  _save(tmp_path / "few", config, start, 1, 2, 3, 4, keep=2)
  folders = sorted(p.name for p in (tmp_path / "few/checkpoints").iterdir())
  assert folders == ["3", "4"]
  assert checkpoint.latest_step(tmp_path / "few") == 4


def test_a_save_is_not_disturbed_by_the_steps_after_it(tmp_path, case):
  config, _, start, _ = case
  grow = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  manager = checkpoint.Checkpoints(tmp_path / "busy", keep=9)
  want, current = {}, start
  for step in range(1, 6):
    current = grow(current)
    want[step] = jax.device_get(current.params)
    manager.save(step, current, {}, _meta(config))
    for _ in range(3):
      current = grow(current)
  manager.close()
  for step, params in want.items():
    _, found = checkpoint.load_params(tmp_path / "busy", step)
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize(
  ("item", "harm"),
  rotation.cases(
    list(
      itertools.product(
        ["params", "state", "data", "meta"], [_flip, _truncate, os.unlink]
      )
    ),
    [
      ("params", _flip),
      ("state", _truncate),
      ("data", os.unlink),
      ("meta", _flip),
    ],
  ),
)
def test_a_damaged_checkpoint_is_told_and_passed_over(case, item, harm, capfd):
  config, mesh, _, folder = case
  harm(_largest(folder / "checkpoints/3" / item))
  found = _restore(folder, config, mesh)
  assert found.step == 2 and found.data == {"place": 2}
  (line,) = capfd.readouterr().out.splitlines()
  assert "3 is damaged" in line and item in line and "one before" in line
  assert (folder / "damaged/3-0" / item).is_dir()
  # The same step can be saved again.
  _save(folder, config, found.state, 3)
  assert _restore(folder, config, mesh).step == 3


@pytest.mark.parametrize(
  "files",
  rotation.cases(
    [
      "params/**/d/*",
      "state/**/d/*",
      "state/_METADATA",
      "data/metadata",
      "meta/metadata",
    ],
    ["params/**/d/*", "data/metadata"],
  ),
)
def test_without_checksums_what_cannot_be_read_is_passed_over(
  case, files, capfd, monkeypatch
):
  config, mesh, _, folder = case
  (folder / "checkpoints/3" / integrity.MANIFEST).unlink()
  assert _restore(folder, config, mesh).step == 3
  for path in (folder / "checkpoints/3").glob(files):
    _truncate(path)
  # Of several processes none may begin to read what another then cannot.
  monkeypatch.setattr(checkpoint.processes, "is_alone", lambda: False)
  monkeypatch.setattr(checkpoint.processes, "of_first", lambda value: value)
  monkeypatch.setattr(checkpoint.processes, "wait", lambda name: None)
  assert _restore(folder, config, mesh).step == 2
  (line,) = capfd.readouterr().out.splitlines()
  assert "3 is damaged" in line and files.split("/")[0] in line


def test_nothing_but_damage_is_an_error_and_stays(case, capfd):
  config, mesh, _, folder = case
  for step in "123":
    _flip(_largest(folder / "checkpoints" / step / "state"))
  # A restart must not begin anew in silence.
  for _ in range(2):
    with pytest.raises(errors.UserError, match=r"every checkpoint .* damaged"):
      _restore(folder, config, mesh)
  assert len(list((folder / "damaged").iterdir())) == 3


def test_a_reader_at_fault_is_not_called_damage(case, monkeypatch):
  config, mesh, _, folder = case

  def fail(*_args, **_kwargs):
    raise ValueError("tree structures do not match")

  monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "restore", fail)
  with pytest.raises(ValueError, match="tree structures"):
    _restore(folder, config, mesh)
  assert not (folder / "damaged").exists()


def test_check_comes_before_the_arrays(case):
  config, mesh, _, folder = case
  config.model.num_layers = 2

  def check(meta):
    raise errors.UserError(f"layers {meta['config']['model']['num_layers']}")

  with pytest.raises(errors.UserError, match="layers 1"):
    _restore(folder, config, mesh, check)


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/3"])
def test_params_alone(case, where):
  _config, _, start, folder = case
  # The optimizer is not read.
  shutil.rmtree(folder / "checkpoints/3/state")
  (folder / "checkpoints/3" / integrity.MANIFEST).unlink()
  saved, params = checkpoint.load_params(folder / where)
  assert saved["model"]["d_model"] == 32
  jax.tree.map(np.testing.assert_array_equal, params, start.params)
  config, module = checkpoint.load_model(folder / where)
  assert config.model.mixers["memory"].num_slots == 4
  hidden, _ = module.hidden(jnp.ones((1, 3), jnp.int32))
  assert module.logits(hidden).shape == (1, 3, 256)


def test_params_of_the_last_whole_one(case, capfd):
  _, _, _, folder = case
  _flip(_largest(folder / "checkpoints/3/params"))
  checkpoint.load_params(folder)
  assert "3 is damaged" in capfd.readouterr().out
  with pytest.raises(errors.UserError, match="no whole checkpoint"):
    checkpoint.load_params(folder, 3)
  assert (folder / "checkpoints/3").is_dir(), "reading moves nothing"


def test_the_newest_is_replaced_while_it_is_read(case, monkeypatch, capsys):
  *_, folder = case
  root, problem, asked = folder / "checkpoints", integrity.problem, []

  def replaced(path):
    """Behind the look at the checksums, while the arrays are read."""
    found, step = problem(path), int(path.name)
    asked.append(step)
    if len(asked) < 4:
      # Its trainer has saved the next; of this one some files are left.
      shutil.copytree(root / str(step), root / str(step + 1))
      if len(asked) == 2:
        shutil.rmtree(root / str(step))
      shutil.rmtree(root / str(step) / "params", ignore_errors=True)
    return found

  monkeypatch.setattr(integrity, "problem", replaced)
  assert load.read(folder).step == 6
  assert asked == [3, 4, 5, 6]
  assert capsys.readouterr().out == ""
  # The same where checksums are looked at while files vanish.

  def vanishing(path):
    if path.name == "6":
      shutil.copytree(root / "6", root / "7")
      (root / "6/params/_METADATA").unlink()
    return problem(path)

  monkeypatch.setattr(integrity, "problem", vanishing)
  assert load.read(folder).step == 7
  assert capsys.readouterr().out == ""


def test_each_is_replaced_before_it_can_be_read(case, monkeypatch):
  *_, folder = case
  root = folder / "checkpoints"

  def replaced(where, step, mesh):
    (root / str(step)).rename(root / str(step + 1))
    raise FileNotFoundError(errno.ENOENT, "gone", "a/file")

  monkeypatch.setattr(load, "_read", replaced)
  with pytest.raises(errors.UserError, match="replaced by the next"):
    load.read(folder)


def test_a_reader_at_fault_keeps_its_traceback(case, monkeypatch):
  *_, folder = case

  def broken(*unused):
    raise KeyError("a bug")

  monkeypatch.setattr(load, "_read", broken)
  with pytest.raises(KeyError):
    load.read(folder)
  # Without checksums it may be the checkpoint's fault.
  for path in folder.glob("checkpoints/*/sha256.json"):
    path.unlink()
  with pytest.raises(errors.UserError, match="no whole checkpoint"):
    load.read(folder)


@pytest.mark.parametrize(
  "change",
  [
    {"config": None},
    {"config": {"name": 3}},
    {"config": {"name": "a", "model": {"d_model": "x"}}},
    {"config": {"name": "a", "model": {"d_model": 0}}},
    {"config": {"name": "a", "model": {"mixer": {"name": "trellis"}}}},
    {"config": {"name": "a", "model": {"mixers": {"m": 5}}}},
    {"config": {"name": "a", "data": []}},
  ],
  ids=str,
)
def test_a_meta_of_wrong_values(case, change):
  *_, folder = case
  path = folder / "checkpoints/3"
  (path / integrity.MANIFEST).unlink()
  meta = path / "meta/metadata"
  meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
  with pytest.raises(errors.UserError) as caught:
    load.read(folder, 3)
  assert "\n" not in str(caught.value)


def test_what_is_not_there(tmp_path, case):
  _, _, _, folder = case
  assert checkpoint.latest_step(tmp_path / "no") is None
  with pytest.raises(errors.UserError, match="no checkpoint in"):
    checkpoint.load_params(tmp_path / "no")
  with pytest.raises(errors.UserError, match="no checkpoint of step 9"):
    checkpoint.load_params(folder, 9)


def test_a_config_of_another_version(case):
  config, _, start, folder = case
  saved = config_lib.to_dict(config)
  saved["model"]["wings"] = 2
  manager = checkpoint.Checkpoints(folder, keep=3)
  manager.save(4, start, {}, {"config": saved})
  manager.close()
  with pytest.raises(errors.UserError, match="wings"):
    checkpoint.load_params(folder)


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
      manager.save(step, start, {"place": step}, _meta(config))
      manager.wait()
      saved = step
  message = str(error.value)
  assert "No space left on device; free some space" in message
  assert "\n" not in message and saved >= 1
  for path in small_disk.glob("other*"):
    path.unlink()
  # The save that failed may be whole: without room only for its checksums.
  found = _restore(small_disk, config, mesh)
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
    manager.save(4, start, {}, _meta(config))
    with pytest.raises(errors.UserError, match=os.strerror(number)):
      _until_told(manager)
  manager.close()
  assert _restore(folder, config, mesh).step == 4


def test_no_permission_to_save(case, monkeypatch):
  # Tests may run as root, whom no permission bit stops.
  config, _, start, folder = case
  manager = checkpoint.Checkpoints(folder, keep=3)
  monkeypatch.setattr(ocp.CheckpointManager, "save", _raise(errno.EACCES))
  with pytest.raises(errors.UserError, match="Permission denied; change"):
    manager.save(4, start, {}, _meta(config))
  manager.close()
  assert checkpoint.latest_step(folder) == 3
