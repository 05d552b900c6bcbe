"""Shards that were damaged are noticed, and written again."""

import json
import os
import shutil
import subprocess
import sys

import buckets
import numpy as np
import pytest

from memcomp import errors
from memcomp.data import prepare, shards, sources
from memcomp.data import tokenizer as tokenizer_lib


@pytest.fixture
def corpus(tmp_path):
  (tmp_path / "corpus").mkdir()
  random = np.random.default_rng(0)
  for i in range(3):
    content = random.integers(97, 123, 30_000, np.uint8)
    (tmp_path / "corpus" / f"{i}.txt").write_bytes(content.tobytes())
  return str(tmp_path / "corpus")


@pytest.fixture
def prepared(corpus, tmp_path):
  out = tmp_path / "out"
  prepare.prepare(corpus, str(out), shard_tokens=20_000)
  return out


def contents(out):
  return {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}


def shard_of(out):
  return sorted(out.glob("tokens-*.arrayrecord"))[1]


def read_all(out):
  store = sources.open_source(str(out), tokenizer_lib.load("bytes"))
  for document, size in enumerate(store.lengths):
    store.read(document, 0, int(size))


def cut_short(out):
  path = shard_of(out)
  os.truncate(path, path.stat().st_size // 2)


def flip(out):
  path = shard_of(out)
  content = bytearray(path.read_bytes())
  content[1000] ^= 0xFF
  path.write_bytes(content)


def cut_short_with_its_size(out):
  """As if the manifest, too, were of the broken file."""
  cut_short(out)
  edit(out, lambda m: m["shards"][1].update(bytes=shard_of(out).stat().st_size))


def edit(out, change):
  path = out / "manifest.json"
  manifest = json.loads(path.read_text())
  change(manifest)
  path.write_text(json.dumps(manifest))


def flip_documents(out):
  path = out / "documents.npz"
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 0xFF
  path.write_bytes(content)


DAMAGE = {
  "missing": (lambda out: shard_of(out).unlink(), "No such file"),
  "short": (cut_short, "bytes where"),
  "flipped": (flip, "missing or corrupt .record"),
  "short, size too": (cut_short_with_its_size, "0 records where . are due"),
  "documents": (flip_documents, "SHA-256"),
  "no json": (lambda out: (out / "manifest.json").write_text("{"), "corrupt"),
  "list": (lambda out: (out / "manifest.json").write_text("[]"), "format"),
  "format": (lambda out: edit(out, lambda m: m.update(format=9)), "format"),
  "no shards": (lambda out: edit(out, lambda m: m.pop("shards")), "no shards"),
  "counts": (
    lambda out: edit(out, lambda m: m["unit_tokens"].append(5)),
    "contradict",
  ),
  "shard dropped": (
    lambda out: edit(out, lambda m: m["shards"].pop()),
    "contradict",
  ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(damage, prepared):
  read_all(prepared)
  harm, message = DAMAGE[damage]
  harm(prepared)
  with pytest.raises(errors.UserError, match=message) as caught:
    read_all(prepared)
  assert "\n" not in str(caught.value)
  assert str(prepared) in str(caught.value)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_repaired(damage, corpus, prepared):
  before = contents(prepared)
  DAMAGE[damage][0](prepared)
  prepare.prepare(corpus, str(prepared), shard_tokens=20_000, verify=True)
  assert contents(prepared) == before


@pytest.mark.parametrize("place", [0.3, 0.6])
def test_a_damaged_index_of_a_unit_is_written_again(place, corpus, prepared):
  before = contents(prepared)
  path = sorted(prepared.glob("units/*.npz"))[1]
  content = bytearray(path.read_bytes())
  whole = bytes(content)
  content[int(place * len(content))] ^= 0xFF
  path.write_bytes(content)
  prepare.prepare(corpus, str(prepared), shard_tokens=20_000)
  assert contents(prepared) == before
  assert path.read_bytes() == whole


@pytest.mark.parametrize(
  "change",
  [
    lambda index: [],
    lambda index: 5,
    lambda index: {"tokens": index["tokens"]},
    lambda index: index | {"tokens": "a"},
    lambda index: index | {"tokens": index["tokens"] + 1},
    lambda index: index | {"shards": []},
    lambda index: index | {"shards": [index["shards"][0] | {"file": 5}]},
    lambda index: index | {"shards": {}},
    lambda index: index | {"shards": [5]},
    lambda index: index | {"shards": [{"file": "a", "bytes": 1}]},
  ],
)
def test_an_index_that_is_json_but_damaged(change, corpus, prepared):
  before = contents(prepared)
  path = sorted(prepared.glob("units/*.json"))[1]
  whole = path.read_bytes()
  path.write_text(json.dumps(change(json.loads(whole))))
  prepare.prepare(corpus, str(prepared), shard_tokens=20_000)
  assert contents(prepared) == before
  assert path.read_bytes() == whole


def test_shards_in_a_bucket_are_read(prepared, tmp_path, monkeypatch):
  buckets.make(tmp_path / "service", monkeypatch)
  here = sources.open_source(str(prepared), tokenizer_lib.load("bytes"))
  shutil.copytree(prepared, tmp_path / "service" / "bucket" / "out")
  there = sources.open_source("gs://bucket/out", tokenizer_lib.load("bytes"))
  assert there.fingerprint == here.fingerprint
  for document, size in enumerate(here.lengths):
    mine, theirs = (s.read(document, 3, int(size)) for s in (here, there))
    np.testing.assert_array_equal(mine, theirs)
  with pytest.raises(errors.UserError, match="bucket/no: no manifest"):
    sources.open_source("gs://bucket/no", tokenizer_lib.load("bytes"))


READ = """
import sys
from memcomp import cli
from memcomp.data import sources
from memcomp.data import tokenizer as tokenizer_lib
def program():
  tokenizer = tokenizer_lib.load("bytes")
  stores = [sources.open_source(path, tokenizer) for path in sys.argv[1:]]
  for _ in range(2):
    for store in stores:
      for document, size in enumerate(store.lengths):
        store.read(document, 0, int(size))
  print(sum(store.num_tokens for store in stores))
sys.exit(cli.guard(program))
"""


def with_open_files(limit, *folders):
  """Reads shards where a process may open so many files."""
  limited = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', ""]
  return subprocess.run(
    [*limited, sys.executable, "-c", READ, *map(str, folders)],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
    check=False,
  )


def test_more_shards_than_files_may_be_open(corpus, tmp_path, monkeypatch):
  monkeypatch.setattr(os, "fsync", lambda descriptor: None)
  folders = [tmp_path / name for name in ("a", "b", "c", "d")]
  for folder in folders:
    prepare.prepare(corpus, str(folder), shard_tokens=1_000)
  assert len(list(folders[0].glob("*.arrayrecord"))) == 90
  done = with_open_files(80, *folders)
  assert (done.returncode, done.stdout) == (0, "360000\n"), done.stderr


def test_no_file_left_to_open_is_no_damage(prepared, monkeypatch):
  def refuse(path, **options):
    raise RuntimeError(f"open() failed: Too many open files; opening {path}")

  monkeypatch.setattr(shards.array_record_module, "ArrayRecordReader", refuse)
  with pytest.raises(errors.UserError, match=r"Too many open files; .*ulimit"):
    read_all(prepared)


@pytest.mark.parametrize(
  "change",
  [
    {"tokenizer": None},
    {"tokenizer": {}},
    {"shards": 3},
    {"shards": [{}]},
    {"record_tokens": 0},
    {"record_tokens": "x"},
    {"unit_tokens": "x"},
    {"unit_tokens": None},
    {"dtype": "x"},
    {"documents": []},
    {"files": 5},
  ],
  ids=str,
)
def test_a_manifest_of_other_types(prepared, change):
  path = prepared / "manifest.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(errors.UserError, match=r"manifest\.json") as caught:
    read_all(prepared)
  assert "\n" not in str(caught.value)
