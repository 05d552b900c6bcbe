"""Stored tokens beside one another and beside text."""

import numpy as np
import pytest

from memcomp import config as config_lib
from memcomp.data import prepare, sources
from memcomp.data import tokenizer as tokenizer_lib

BYTES = tokenizer_lib.load("bytes")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
  """A folder with a token file, texts, and shards of them."""
  monkeypatch.chdir(tmp_path)
  np.arange(5, dtype="<u2").tofile("a.bin")
  (tmp_path / "b.bin").symlink_to("a.bin")
  (tmp_path / "text").mkdir()
  for number in range(20):
    (tmp_path / f"text/{number}.txt").write_text(f"text {number}")
  prepare.prepare("*/*.txt", "shards")


@pytest.mark.parametrize(
  "source", ["a.bin,./a.bin,b.bin,a.bin", "shards,shards/,./shards"]
)
def test_stored_tokens_count_once(source):
  several = sources.open_source(source, BYTES)
  once = sources.open_source(source.partition(",")[0], BYTES)
  assert several.num_tokens == once.num_tokens
  assert several.fingerprint == once.fingerprint


@pytest.mark.parametrize(
  ("source", "warned"),
  [
    ("0.5:shards;0.5:text", True),
    ("shards,text", True),
    ("0.5:text;0.5:text/1.txt,text/3.txt,text/18.txt", False),
    ("shards", False),
  ],
)
def test_text_beside_its_shards_is_warned_of(source, warned, capsys):
  config = config_lib.DataConfig(source=source, validation_share=0.4)
  sources.open_split(config, "train")
  assert capsys.readouterr().err == ""
  sources.open_split(config, "validation")
  assert ("may be in both splits" in capsys.readouterr().err) is warned
  config.validation = "text/1.txt"
  sources.open_split(config, "validation")
  assert capsys.readouterr().err == ""
