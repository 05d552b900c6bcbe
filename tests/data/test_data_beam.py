"""Shards that a Beam pipeline wrote are those that prepare writes itself."""

import json
import os
import sys

import numpy as np
import pytest

from memcomp import errors
from memcomp.data import prepare


@pytest.fixture
def corpus(tmp_path, monkeypatch):
  """Eight files and a .jsonl that is cut, named relative to their folder."""
  folder = tmp_path / "corpus"
  folder.mkdir()
  random = np.random.default_rng(0)
  for i in range(8):
    content = random.integers(97, 123, 9000, np.uint8).tobytes()
    (folder / f"{i}.txt").write_bytes(content)
  lines = [json.dumps({"text": f"line {i} " * (i % 50)}) for i in range(300)]
  (folder / "long.jsonl").write_text("\n".join(lines))
  monkeypatch.chdir(tmp_path)
  return "corpus"


def contents(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in folder.rglob("*")
    if path.is_file() and path.name != ".lock"
  }


def run(source, out, *beam):
  more = ["--beam", *beam] if beam else ["--workers=1"]
  return prepare.main(
    [f"--source={source}", f"--out={out}", "--shard_tokens=20000", *more]
  )


# Beam's own modules warn on import.
@pytest.mark.filterwarnings("default")
def test_beam_writes_the_same_files(corpus, tmp_path, monkeypatch, capsys):
  pytest.importorskip("apache_beam", reason="needs the extra beam")
  assert run(corpus, "one") == 0
  assert run(corpus, "other", "--runner=DirectRunner") == 0
  written = contents(tmp_path / "other")
  assert written == contents(tmp_path / "one")
  # A unit without its index is written again, the others stay.
  os.remove(tmp_path / "other" / "units" / "00001.json")
  untouched = tmp_path / "other" / "tokens-00000-000.arrayrecord"
  before = untouched.stat().st_mtime_ns
  assert run(corpus, "other", "--runner=DirectRunner") == 0
  assert contents(tmp_path / "other") == written
  assert untouched.stat().st_mtime_ns == before
  # A worker's error is told in one line.
  (tmp_path / "corpus" / "3.txt").write_bytes(b"\xff\xff")
  capsys.readouterr()
  assert run(corpus, "third", "--runner=DirectRunner") == errors.EXIT_BAD_INPUT
  (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
  assert line.startswith("prepare: ") and "3.txt:1: not UTF-8" in line
  assert line.endswith("iconv -t UTF-8")


@pytest.mark.filterwarnings("default")
def test_folders_of_built_in_names_change_nothing(corpus):
  """`bytes` is a tokenizer of memcomp, whatever lies in the working folder."""
  pytest.importorskip("apache_beam", reason="needs the extra beam")
  os.mkdir("bytes")
  os.mkdir("chatml")
  assert run(corpus, "out", "--runner=DirectRunner") == 0


@pytest.mark.filterwarnings("default")
def test_a_runner_that_fails_is_not_a_full_disk(corpus, monkeypatch):
  pytest.importorskip("apache_beam", reason="needs the extra beam")
  from memcomp.data import beam

  def fail(*_):
    raise RuntimeError("the runner is not there")

  monkeypatch.setattr(beam, "run", fail)
  with pytest.raises(RuntimeError, match="not there"):
    run(corpus, "out", "--runner=DirectRunner")


def test_beam_is_asked_for(corpus, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "apache_beam", None)
  monkeypatch.delitem(sys.modules, "memcomp.data.beam", raising=False)
  monkeypatch.delattr("memcomp.data.beam", raising=False)
  assert run(corpus, "out", "--runner=DirectRunner") == errors.EXIT_BAD_INPUT
  assert "pip install 'memcomp[beam]'" in capsys.readouterr().err
  assert not os.path.exists("out")


def test_flags_of_beam_need_it(corpus):
  with pytest.raises(SystemExit):
    prepare.main([f"--source={corpus}", "--out=out", "--runner=DirectRunner"])
