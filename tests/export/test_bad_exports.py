"""Exports that other programs have changed."""

import json
import shutil

import pytest

from memcomp import errors
from memcomp.export import read, tensors


def test_arrays_of_another_model(exported, tmp_path):
  out = shutil.copytree(exported, tmp_path / "copy")
  (out / "sha256.json").unlink()
  meta = json.loads((out / "config.json").read_text())
  for field, value, message in (
    ("mlp_dim", 8, "mlp.down.weight has the shape"),
    ("num_layers", 3, "has no array layers.2"),
    ("num_layers", 1, "has arrays that the model of its config.json has not"),
  ):
    changed = json.loads(json.dumps(meta))
    changed["config"]["model"][field] = value
    (out / "config.json").write_text(json.dumps(changed))
    with pytest.raises(errors.UserError, match=message):
      read.load(out)
  (out / "config.json").write_text("{}")
  with pytest.raises(errors.UserError, match="not an exported model"):
    read.load(out)


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("format_version", 2, "another version of the format"),
    ("arrays", "pickle", "is damaged"),
    ("ends", [-1], "is damaged"),
    ("ends", [256], "is damaged"),
  ],
)
def test_what_no_export_says_of_itself(
  exported, tmp_path, field, value, message
):
  out = shutil.copytree(exported, tmp_path / "copy")
  (out / "sha256.json").unlink()
  meta = json.loads((out / "config.json").read_text()) | {field: value}
  (out / "config.json").write_text(json.dumps(meta))
  with pytest.raises(errors.UserError, match=message):
    read.load(out)


def test_an_index_of_another_copy(exported, tmp_path):
  """Files are there, but not the arrays where the index has them."""
  out = shutil.copytree(exported, tmp_path / "copy")
  (out / "sha256.json").unlink()
  path = out / tensors.INDEX
  index = json.loads(path.read_text())
  where = index["weight_map"]
  first, *_, last = where
  for change, message in (
    ({first: where[last], last: where[first]}, "restore it and model.safe"),
    ({first: 5}, "weight_map has a file that is no text"),
  ):
    path.write_text(json.dumps(index | {"weight_map": where | change}))
    with pytest.raises(errors.UserError, match=message):
      read.load(out)
  (out / "sha256.json").write_text('{"files": []}')
  with pytest.raises(errors.UserError, match=r"sha256\.json cannot be read"):
    read.load(out)
