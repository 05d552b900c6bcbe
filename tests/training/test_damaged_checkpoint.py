"""Checkpoints that are damaged, or replaced while they are read."""

import errno
import itertools
import json
import os
import pathlib
import shutil

import pytest
import rotation
from checkpoint_cases import MARKS, restore, save

from memcomp import errors, integrity
from memcomp.runs import load
from memcomp.training import checkpoint

pytestmark = MARKS


def _largest(folder: pathlib.Path) -> pathlib.Path:
  files = [p for p in folder.rglob("*") if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def _flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def _truncate(path):
  os.truncate(path, path.stat().st_size // 2)


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
  found = restore(folder, config, mesh)
  assert found.step == 2 and found.data == {"place": 2}
  (line,) = capfd.readouterr().out.splitlines()
  assert "3 is damaged" in line and item in line and "one before" in line
  assert (folder / "damaged/3-0" / item).is_dir()
  # The same step can be saved again.
  save(folder, config, found.state, 3)
  assert restore(folder, config, mesh).step == 3


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
  assert restore(folder, config, mesh).step == 3
  for path in (folder / "checkpoints/3").glob(files):
    _truncate(path)
  # Of several processes none may begin to read what another then cannot.
  monkeypatch.setattr(checkpoint.processes, "is_alone", lambda: False)
  monkeypatch.setattr(checkpoint.processes, "of_first", lambda value: value)
  monkeypatch.setattr(checkpoint.processes, "wait", lambda name: None)
  assert restore(folder, config, mesh).step == 2
  (line,) = capfd.readouterr().out.splitlines()
  assert "3 is damaged" in line and files.split("/")[0] in line


def test_nothing_but_damage_is_an_error_and_stays(case, capfd):
  config, mesh, _, folder = case
  for step in "123":
    _flip(_largest(folder / "checkpoints" / step / "state"))
  # A restart must not begin anew in silence.
  for _ in range(2):
    with pytest.raises(errors.UserError, match=r"every checkpoint .* damaged"):
      restore(folder, config, mesh)
  assert len(list((folder / "damaged").iterdir())) == 3


def test_a_reader_at_fault_is_not_called_damage(case, monkeypatch):
  config, mesh, _, folder = case

  def fail(*_args, **_kwargs):
    raise ValueError("tree structures do not match")

  monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "restore", fail)
  with pytest.raises(ValueError, match="tree structures"):
    restore(folder, config, mesh)
  assert not (folder / "damaged").exists()


@pytest.mark.parametrize(
  "said",
  ["RESOURCE_EXHAUSTED: Out of memory", "PERMISSION_DENIED: Permission denied"],
)
@pytest.mark.parametrize("place", ["params", "state"])
def test_a_failure_of_the_machine_is_not_called_damage(
  case, said, place, monkeypatch
):
  """Also where no checksums say that the files are whole."""
  config, mesh, _, folder = case
  (folder / "checkpoints/3" / integrity.MANIFEST).unlink()

  def fail(*_args, **_kwargs):
    raise ValueError(said)  # what TensorStore makes of every status

  if place == "params":
    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "restore", fail)
    monkeypatch.setattr(load, "_read", fail)
  else:
    monkeypatch.setattr(integrity.ts.KvStore, "open", fail)
  with pytest.raises(ValueError, match=said):
    restore(folder, config, mesh)
  if place == "params":
    with pytest.raises(ValueError, match=said):
      load.read(folder)
  assert not (folder / "damaged").exists()


def test_params_of_the_last_whole_one(case, capfd):
  _, _, _, folder = case
  _flip(_largest(folder / "checkpoints/3/params"))
  load.read(folder)
  assert "3 is damaged" in capfd.readouterr().out
  with pytest.raises(errors.UserError, match="no whole checkpoint"):
    load.read(folder, 3)
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
