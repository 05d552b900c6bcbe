"""Shards equal the text they were made of; what prepare says and refuses."""

import json
import os
import pathlib
import time

import numpy as np
import pytest
import tokenizers
from prepare_cases import BYTES, contents, run

from memcomp import config as config_lib
from memcomp import errors, lock
from memcomp.data import files as files_lib
from memcomp.data import prepare, shards, sources, units
from memcomp.data import tokenizer as tokenizer_lib

pytestmark = pytest.mark.usefixtures("no_fsync")


def documents(store):
  return [
    store.read(i, 0, int(size)).tolist() for i, size in enumerate(store.lengths)
  ]


def test_round_trip(corpus, tmp_path):
  out = tmp_path / "out"
  run(corpus, out)
  direct = sources.open_source(corpus, BYTES)
  stored = sources.open_source(str(out), BYTES)
  assert documents(stored) == documents(direct)
  assert stored.num_tokens == direct.num_tokens
  names = [stored.names[i] for i in range(len(stored.lengths))]
  assert names[0] == "0.txt"
  assert "long.jsonl:3" in names  # blank lines count
  assert len(set(names)) == len(names)
  manifest = json.loads((out / "manifest.json").read_text())
  assert manifest["num_tokens"] == direct.num_tokens
  assert len(manifest["shards"]) > 3
  assert all(s["records"] <= 2 for s in manifest["shards"])
  random = np.random.default_rng(1)
  for _ in range(200):
    document = int(random.integers(len(direct.lengths)))
    start, stop = sorted(random.integers(0, direct.lengths[document] + 1, 2))
    np.testing.assert_array_equal(
      stored.read(document, int(start), int(stop)),
      direct.read(document, int(start), int(stop)),
    )


def test_splits_agree_with_the_text(corpus, tmp_path):
  run(corpus, tmp_path / "out")
  for split in sources.SPLITS:
    ours, theirs = (
      sources.open_split(
        config_lib.DataConfig(source=source, validation_share=0.3), split
      )
      for source in (str(tmp_path / "out"), corpus)
    )
    assert documents(ours) == documents(theirs)


def test_workers_do_not_change_the_result(corpus, tmp_path):
  run(corpus, tmp_path / "one", shard_tokens=5000)
  run(corpus, tmp_path / "two", shard_tokens=5000, workers=2)
  assert contents(tmp_path / "one") == contents(tmp_path / "two")
  assert len(contents(tmp_path / "one")) > 20


def word_tokenizer(tmp_path):
  vocab = {
    "<unk>": 0,
    "zipped": 1,
    "line": 2,
    **{str(i): i + 3 for i in range(600)},
  }
  built = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocab=vocab, unk_token="<unk>")
  )
  built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  path = tmp_path / "words.json"
  built.save(str(path))
  return str(path)


def test_other_tokenizer(corpus, tmp_path):
  name = word_tokenizer(tmp_path)
  run(corpus, tmp_path / "out", tokenizer=name)
  tokenizer = tokenizer_lib.load(name)
  stored = sources.open_source(str(tmp_path / "out"), tokenizer)
  assert documents(stored) == documents(sources.open_source(corpus, tokenizer))
  assert max(map(max, documents(stored))) > 255  # stored in two bytes
  with pytest.raises(
    errors.UserError, match=r"prepared with the tokenizer words\.json"
  ):
    sources.open_source(str(tmp_path / "out"), BYTES)


def test_long_document_has_bounded_records(tmp_path):
  path = tmp_path / "long.txt"
  content = np.random.default_rng(0).integers(32, 127, 100_000, np.uint8)
  path.write_bytes(content.tobytes())
  run(path, tmp_path / "out", shard_tokens=1 << 20)
  manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
  assert manifest["shards"][0]["records"] == -(-100_000 // units.RECORD_TOKENS)
  stored = sources.open_source(str(tmp_path / "out"), BYTES)
  np.testing.assert_array_equal(
    stored.read(0, 16_380, 70_000), content[16_380:70_000]
  )


def test_units_cover_the_corpus_once(corpus):
  files = files_lib.find(corpus)
  for size in (1, 500, 3000, 10**9):
    cut = units.cut(files, size)
    assert [unit.number for unit in cut] == list(range(len(cut)))
    parts = [part for unit in cut for part in unit.parts]
    assert sorted({part.file for part in parts}) == list(range(len(files)))
    for number, file in enumerate(files):
      mine = [part for part in parts if part.file == number]
      if mine[0].stop < 0:
        assert len(mine) == 1
        continue
      content = pathlib.Path(file.path).read_bytes()
      assert b"".join(content[p.start : p.stop] for p in mine) == content
      for part in mine:
        assert part.line == content.count(b"\n", 0, part.start) + 1
        assert part.start == 0 or content[part.start - 1 : part.start] == b"\n"
    assert len(units.cut(files, 10**9)) == 1


def test_command_says_what_it_did(corpus, tmp_path, capsys):
  flags = [f"--source={corpus}", f"--out={tmp_path / 'out'}", "--workers=1"]
  assert prepare.main(flags) == 0
  assert "tokens in" in capsys.readouterr().err
  assert prepare.main(flags) == 0
  assert "1 of 1 parts are done already" in capsys.readouterr().err
  assert prepare.main([*flags, "--shard_tokens=17"]) == errors.EXIT_BAD_INPUT
  said = capsys.readouterr().err.strip()
  assert "begun with another shard_tokens" in said
  assert "\n" not in said
  with pytest.raises(SystemExit) as caught:
    prepare.main(["--help"])
  assert caught.value.code == 0
  assert "--shard_tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "workers"), [(7, 7), (None, 1)])
def test_one_worker_per_core(count, workers, monkeypatch, capsys):
  """Also where the system does not say which cores are ours, as macOS."""
  monkeypatch.delattr(os, "sched_getaffinity", raising=False)
  monkeypatch.setattr(os, "cpu_count", lambda: count)
  with pytest.raises(SystemExit) as caught:
    prepare.main(["--help"])
  assert caught.value.code == 0
  said = " ".join(capsys.readouterr().out.split())
  assert f"one per core, {workers})" in said


def test_progress(corpus, tmp_path, capsys, monkeypatch):
  clock = iter(range(0, 10**6, 20))
  monkeypatch.setattr(time, "monotonic", lambda: next(clock))
  run(corpus, tmp_path / "out", shard_tokens=5000)
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) > 20
  assert "of 15 files" in lines[0]
  assert "? left" in lines[0]
  assert "tokens/s" in lines[-2]
  assert lines[-2].endswith(" s left")


def test_other_work_in_the_folder_is_refused(corpus, tmp_path):
  out = tmp_path / "out"
  run(corpus, out)
  (tmp_path / "other.txt").write_text("other")
  with pytest.raises(errors.UserError, match="begun with another source"):
    run(tmp_path / "other.txt", out)
  with pytest.raises(errors.UserError, match="begun with another tokenizer"):
    run(corpus, out, tokenizer=word_tokenizer(tmp_path))
  full = tmp_path / "full"
  full.mkdir()
  (full / "precious").write_text("")
  with pytest.raises(errors.UserError, match=r"holds other files \(precious\)"):
    run(corpus, full)


def test_two_runs_at_once_are_refused(corpus, tmp_path):
  (tmp_path / "out").mkdir()
  with (
    lock.hold(tmp_path / "out/.lock"),
    pytest.raises(
      errors.UserError, match="is being written by a running process"
    ),
  ):
    run(corpus, tmp_path / "out")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"shard_tokens": 0}, "--shard_tokens=0: give 1 or more"),
    ({"workers": 0}, "--workers=0: give 1 or more"),
    ({"source": "1:a;2:b"}, "is no text"),
    ({"source": "missing"}, "no such file or folder; check --source$"),
    ({"source": ""}, "^--source is empty"),
    (
      {"source": "stdlib,gs://b/x"},
      "--source: 'gs://b/x' is in a bucket; copy",
    ),
    ({"out": "/proc/none"}, "--out: cannot write to /proc/none"),
    ({"out": ""}, "--out is empty"),
    ({"out": "gs://b/s"}, "--out=gs://b/s: only checkpoints are written to"),
    ({"tokenizer": "bites"}, "unknown tokenizer"),
  ],
)
def test_bad_arguments(changes, message, corpus, tmp_path):
  arguments = {"source": corpus, "out": tmp_path / "out"} | changes
  with pytest.raises(errors.UserError, match=message) as caught:
    run(**arguments)
  assert "\n" not in str(caught.value)


def test_the_command_tells_mistakes(corpus, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "file").touch()
  for out, message in (
    ("file/x", "Not a directory"),
    ("a" * 300, "File name too long"),
    ("/proc/x", "/proc/x"),
    ("~nobody-of-it/x", "no home folder"),
  ):
    code = prepare.main(["--source", corpus, f"--out={out}"])
    err = capsys.readouterr().err
    assert code == 2 and message in err, err
    assert err.startswith("prepare: ") and err.count("\n") == 1
  code = prepare.main(["--source=~/corpus/0.txt", "--out=~/out", "--workers=1"])
  assert code == 0 and (tmp_path / "out" / shards.MANIFEST).exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_text_stops_it(workers, corpus, tmp_path):
  path = pathlib.Path(corpus) / "long.jsonl"
  content = path.read_bytes() + b"\n{oops}\n"
  path.write_bytes(content)
  line = content.count(b"\n")
  with pytest.raises(
    errors.UserError, match=rf"long\.jsonl:{line}: invalid JSON"
  ):
    run(corpus, tmp_path / "out", workers=workers, shard_tokens=2000)


def test_nothing_but_empty_files(tmp_path):
  (tmp_path / "in").mkdir()
  (tmp_path / "in" / "a.txt").write_bytes(b"")
  with pytest.raises(errors.UserError, match="no text in it"):
    run(tmp_path / "in", tmp_path / "out")
