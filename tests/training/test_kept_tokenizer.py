"""A run keeps its tokenizer's file, wherever the one it was given goes."""

import json
import pathlib

import numpy as np
import odd_tokenizers
import pytest
import training_cases

from memcomp import errors, integrity
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import load, report
from memcomp.export import write
from memcomp.runs import workdir
from memcomp.training import run

pytestmark = pytest.mark.usefixtures("leaky_model")


@pytest.fixture
def here(tmp_path, monkeypatch):
  """A folder with a tokenizer, in which all begins."""
  folder = tmp_path / "here"
  folder.mkdir()
  odd_tokenizers.save(odd_tokenizers.special(), folder)
  monkeypatch.chdir(folder)
  return folder


@pytest.fixture
def config(here, text):
  config = training_cases.tiny(text, steps=4)
  config.model.vocab_size = 257
  config.data.tokenizer = "tokenizer.json"
  return config


@pytest.fixture
def trained(config, tmp_path):
  assert run.run(config, tmp_path / "run") == 0
  return tmp_path / "run"


def change(path):
  """Writes another tokenizer."""
  odd_tokenizers.save(odd_tokenizers.byte_level(), path.parent)


@pytest.mark.slow
def test_opened_from_any_folder(trained, here, tmp_path, monkeypatch):
  kept = trained / workdir.TOKENIZER
  assert kept.read_bytes() == (here / "tokenizer.json").read_bytes()
  before = load.open_checkpoint(trained)
  elsewhere = tmp_path / "elsewhere"
  elsewhere.mkdir()
  monkeypatch.chdir(elsewhere)
  for _ in range(2):
    opened = load.open_checkpoint(trained)
    assert opened.tokenizer.fingerprint == before.tokenizer.fingerprint
    step = load.open_checkpoint(trained / "checkpoints/4")
    assert step.tokenizer.fingerprint == before.tokenizer.fingerprint
    # Another one in its place makes no difference.
    change(here / "tokenizer.json")
    change(elsewhere / "tokenizer.json")
  # Results say what they said before.
  name = report.describe(opened)["tokenizer"]["name"]
  assert name == report.describe(before)["tokenizer"]["name"]
  write.export(trained, "exported")
  assert pathlib.Path("exported/tokenizer.json").read_bytes() == (
    kept.read_bytes()
  )
  assert load.open_checkpoint("exported").tokenizer.vocab_size == 257


@pytest.mark.slow
def test_a_run_of_before_has_none(trained, here, tmp_path, monkeypatch):
  (trained / workdir.TOKENIZER).unlink()
  assert load.open_checkpoint(trained).tokenizer.vocab_size == 257
  change(here / "tokenizer.json")
  with pytest.raises(errors.UserError, match="has changed since"):
    load.open_checkpoint(trained)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(errors.UserError, match="cannot read tokenizer"):
    load.open_checkpoint(trained)


def test_a_kept_file_that_is_broken(trained, here):
  (trained / workdir.TOKENIZER).write_text("{")
  assert load.open_checkpoint(trained).tokenizer.vocab_size == 257
  (here / "tokenizer.json").unlink()
  with pytest.raises(errors.UserError, match=r"not a tokenizer\.json"):
    load.open_checkpoint(trained)


def test_training_goes_on_without_the_file(
  trained, config, here, tmp_path, monkeypatch
):
  config.training.steps = 6
  saved = json.loads((trained / "config.json").read_text())
  saved["training"]["steps"] = 6
  integrity.replace_text(trained / "config.json", json.dumps(saved))
  for path in trained.glob("checkpoints/*"):
    meta = path / "meta/metadata"
    content = json.loads(meta.read_text())
    content["config"]["training"]["steps"] = 6
    meta.write_text(json.dumps(content))
    integrity.write(path)
  # It may be called otherwise, or be gone; it must be the same.
  (here / "tokenizer.json").rename(here / "renamed.json")
  config.data.tokenizer = "renamed.json"
  assert run.run(config, trained) == 0
  monkeypatch.chdir(tmp_path)
  assert run.run(config, trained) == 0
  monkeypatch.chdir(here)
  config.data.tokenizer = "tokenizer.json"
  change(here / "tokenizer.json")
  with pytest.raises(errors.UserError, match="trained with another tokenizer"):
    run.run(config, trained)
  kept = tokenizer_lib.load(str(trained / workdir.TOKENIZER))
  assert kept.vocab_size == 257, "what the checkpoints need stays"


def test_a_tokenizer_of_somebody_else_is_not_replaced(
  config, here, tmp_path, monkeypatch
):
  mine = tmp_path / "mine"
  mine.mkdir()
  (mine / workdir.TOKENIZER).write_text("mine")
  for workdir_, checkpoints in ((mine, ""), (tmp_path / "new", str(mine))):
    with pytest.raises(
      errors.UserError, match="is another tokenizer than data"
    ):
      run.run(config, workdir_, checkpoints)
  assert (mine / workdir.TOKENIZER).read_text() == "mine"
  assert not (tmp_path / "new").exists() and len(list(mine.iterdir())) == 1
  # The run's own, from before it was killed, is no obstacle, and neither is a
  # copy.
  for content in ((here / workdir.TOKENIZER).read_text(), "mine"):
    (mine / workdir.TOKENIZER).write_text(content)
    monkeypatch.setattr(run, "_train", lambda *_: errors.EXIT_RESUMABLE)
    assert run.run(config, mine) == errors.EXIT_RESUMABLE


def test_bytes_have_no_file(text, tmp_path):
  assert run.run(training_cases.tiny(text, steps=4), tmp_path / "a") == 0
  assert not (tmp_path / "a" / workdir.TOKENIZER).exists()
  (tmp_path / "a" / workdir.TOKENIZER).write_text("{")  # somebody's
  opened = load.open_checkpoint(tmp_path / "a")
  assert np.array_equal(opened.tokenizer.encode("a"), [97])
