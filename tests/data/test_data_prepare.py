"""Shards equal the text they were made of, whatever happens on the way."""

import concurrent.futures
import contextlib
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import rotation
import tokenizers

from memcomp import config as config_lib
from memcomp import errors, lock
from memcomp.data import prepare, shards, sources, text, units
from memcomp.data import tokenizer as tokenizer_lib

BYTES = tokenizer_lib.load("bytes")
ROOT = pathlib.Path(shards.__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
  """Most of the time goes there; sub-processes still wait for the disk."""
  monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def corpus(tmp_path):
  """Files of many sizes, a long .jsonl, something compressed, empty ones."""
  folder = tmp_path / "corpus"
  folder.mkdir()
  random = np.random.default_rng(0)
  for i in range(12):
    size = int(random.integers(1, 9000))
    content = random.integers(97, 123, size, np.uint8).tobytes()
    (folder / f"{i}.txt").write_bytes(content)
  (folder / "none.txt").write_bytes(b"")
  lines = [json.dumps({"text": f"line {i} é " * (i % 50)}) for i in range(600)]
  (folder / "long.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
  (folder / "z.txt.gz").write_bytes(gzip.compress(b"zipped " * 999))
  return str(folder)


def run(source, out, **changes):
  settings = {"shard_tokens": 20_000, "workers": 1}
  prepare.prepare(str(source), str(out), **settings | changes)


def documents(store):
  return [
    store.read(i, 0, int(size)).tolist() for i, size in enumerate(store.lengths)
  ]


def contents(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in pathlib.Path(folder).rglob("*")
    if path.is_file() and path.name != "plan.json"
  }


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
  files = text.find(corpus)
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


def command(corpus, out, *more):
  flags = [f"--source={corpus}", f"--out={out}", "--shard_tokens=2000", *more]
  return [sys.executable, "-m", "memcomp.data.prepare", *flags]


def start(corpus, out, *more):
  return subprocess.Popen(
    command(corpus, out, *more),
    cwd=ROOT,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def wait_for(out, count):
  """Waits until some units are done, but not all."""
  for _ in range(12_000):
    if len(list(out.glob("units/*.json"))) >= count:
      return
    time.sleep(0.005)
  raise AssertionError("prepare does nothing")


@pytest.mark.parametrize(
  ("number", "workers"),
  rotation.cases(
    [
      (signal.SIGKILL, 1),
      (signal.SIGKILL, 2),
      (signal.SIGINT, 2),
      (signal.SIGTERM, 1),
    ],
    [(signal.SIGKILL, 1), (signal.SIGINT, 2)],
  ),
)
def test_interrupted_run_goes_on(number, workers, corpus, tmp_path):
  for attempt in range(20):
    out = tmp_path / f"out{attempt}"
    process = start(corpus, out, f"--workers={workers}")
    wait_for(out, 2)
    # To the whole group, as a terminal does and as lack of memory may.
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=120)
    if not (out / "manifest.json").exists():
      break
    # On a busy machine it may be done before we look: more to do, then.
    for i in range(12):
      more = pathlib.Path(corpus) / f"more{attempt}-{i}.txt"
      more.write_bytes(b"as before, only more of it\n" * 1000)
  if number != signal.SIGKILL:
    assert process.returncode == errors.EXIT_RESUMABLE, said
    assert "the same command goes on" in said
    assert "Traceback" not in said
  with pytest.raises(errors.UserError, match="has not finished"):
    sources.open_source(str(out), BYTES)
  finished = {p: p.stat().st_mtime_ns for p in out.glob("tokens-*.arrayrecord")}
  done = [json.loads(p.read_text()) for p in out.glob("units/*.json")]
  kept = {out / s["file"] for unit in done for s in unit["shards"]}
  assert kept
  run(corpus, out, shard_tokens=2000)
  assert all(path.stat().st_mtime_ns == finished[path] for path in kept)
  run(corpus, tmp_path / "clean", shard_tokens=2000)
  assert contents(out) == contents(tmp_path / "clean")


def children_of(pid):
  path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
  return [int(child) for child in path.read_text().split()]


def is_running(pid):
  try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
  except OSError:
    return False
  return state.split()[0] != "Z"


def workers_of(pid):
  """Its children, without the one that cleans up behind them."""
  found = []
  for child in children_of(pid):
    with contextlib.suppress(OSError):
      command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
      if b"spawn_main" in command:
        found.append(child)
  return found


@pytest.mark.slow
@pytest.mark.parametrize("units_done", rotation.cases([0, 1], [1]))
def test_a_worker_that_is_killed(units_done, corpus, tmp_path):
  """As for want of memory: while it starts, or in the midst of its work."""
  for attempt in range(20):
    out = tmp_path / f"out{attempt}"
    process = start(corpus, out, "--workers=2")
    while not (workers := workers_of(process.pid)):
      assert process.poll() is None, process.communicate()
    if units_done:
      wait_for(out, units_done)
    with contextlib.suppress(ProcessLookupError):  # On a busy machine.
      os.kill(workers[0], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    if process.returncode:
      break
    for i in range(12):
      more = pathlib.Path(corpus) / f"more{attempt}-{i}.txt"
      more.write_bytes(b"as before, only more of it\n" * 1000)
  assert process.returncode == errors.EXIT_BAD_INPUT, said
  assert "a worker was killed" in said and "fewer --workers" in said
  assert "Traceback" not in said
  assert not any(map(is_running, workers))
  run(corpus, out, shard_tokens=2000)
  run(corpus, tmp_path / "clean", shard_tokens=2000)
  assert contents(out) == contents(tmp_path / "clean")


@pytest.mark.slow
def test_workers_leave_with_a_killed_parent(corpus, tmp_path):
  process = start(corpus, tmp_path / "out", "--workers=2")
  wait_for(tmp_path / "out", 1)
  workers = children_of(process.pid)
  process.kill()
  process.wait()
  until = time.monotonic() + 30
  while any(map(is_running, workers)) and time.monotonic() < until:
    time.sleep(0.01)
  assert not any(map(is_running, workers))
  process.communicate(timeout=120)


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
    pytest.raises(errors.UserError, match="another prepare is writing"),
  ):
    run(corpus, tmp_path / "out")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"shard_tokens": 0}, "--shard_tokens=0: give 1 or more"),
    ({"workers": 0}, "--workers=0: give 1 or more"),
    ({"source": "1:a;2:b"}, "is no text"),
    ({"source": "missing"}, "no such file"),
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


def test_full_disk(corpus, tmp_path, monkeypatch):
  def refuse(*unused):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", refuse)
  with pytest.raises(
    errors.UserError, match=r"No space left on device.*free space"
  ):
    run(corpus, tmp_path / "out")


def test_killed_worker(corpus, tmp_path, monkeypatch):
  def broken(self, *unused):
    future = concurrent.futures.Future()
    future.set_exception(concurrent.futures.process.BrokenProcessPool())
    return future

  monkeypatch.setattr(concurrent.futures.ProcessPoolExecutor, "submit", broken)
  with pytest.raises(errors.UserError, match="fewer --workers"):
    run(corpus, tmp_path / "out", workers=2, shard_tokens=2000)
