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


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--runner=Nope"], "Unexpected pipeline runner: Nope"),
    (["--runner=os.Nope"], "no attribute 'Nope'"),
    (["--runner=nowhere.Nope"], "No module named 'nowhere'"),
    (["--direct_num_workers=abc"], "--direct_num_workers: invalid int value"),
    (
      ["--runner=DirectRunner", "--tokeniser=x", "--shard-tokens", "9"],
      "--tokeniser=x --shard-tokens 9: neither prepare nor Beam",
    ),
    (["more.txt"], "more.txt: neither prepare nor Beam"),
  ],
)
def test_mistakes_in_flags_are_one_line(flags, message, corpus, capfd):
  """Beam drops what it does not know: the shards would be of other settings."""
  pytest.importorskip("apache_beam", reason="needs the extra beam")
  assert run(corpus, "out", *flags) == errors.EXIT_BAD_INPUT
  said = capfd.readouterr().err
  assert said.startswith("prepare: ") and said.count("\n") == 1, said
  assert message in said and "; " in said
  assert not os.path.exists("out")


RUNNER = """
from apache_beam.options import pipeline_options
from apache_beam.runners.direct import direct_runner

class Options(pipeline_options.PipelineOptions):
  @classmethod
  def _add_argparse_args(cls, parser):
    parser.add_argument("--of_this_runner", type=int)

class Runner(direct_runner.DirectRunner):
  pass
"""


@pytest.mark.filterwarnings("default")
def test_a_runner_may_have_options_of_its_own(corpus, tmp_path, monkeypatch):
  pytest.importorskip("apache_beam", reason="needs the extra beam")
  (tmp_path / "own_runner.py").write_text(RUNNER)
  monkeypatch.syspath_prepend(tmp_path)
  flags = "--runner=own_runner.Runner", "--of_this_runner=3"
  assert run(corpus, "out", *flags, "--direct_num_workers", "1") == 0


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
