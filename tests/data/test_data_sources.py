"""What a source may be, how it is split, and what is said when it is bad."""

import gzip

import numpy as np
import pytest
import zstandard
from source_cases import config, jsonl, open_all, texts

from memcomp import config as config_lib
from memcomp import errors
from memcomp.data import files as files_lib
from memcomp.data import sources
from memcomp.data import store as store_lib


@pytest.fixture
def corpus(tmp_path):
  (tmp_path / "sub").mkdir()
  (tmp_path / ".hidden").mkdir()
  files = {
    "b.txt": b"bravo",
    "a.md": "älpha".encode(),
    "empty.txt": b"",
    "image.png": b"\x89PNG",
    ".secret.txt": b"secret",
    ".hidden/x.txt": b"hidden",
    "sub/c.py": b"c = 1\r\n",
    "sub/d.jsonl": jsonl("delta\n", "", "echo") + b"\n" + jsonl("foxtrot"),
    "sub/e.txt.gz": gzip.compress(b"golf"),
    "sub/f.jsonl.zst": zstandard.compress(jsonl("hotel"))
    + zstandard.compress(jsonl("india")),
  }
  for name, content in files.items():
    (tmp_path / name).write_bytes(content)
  return tmp_path


EVERYTHING = [
  "älpha",
  "bravo",
  "c = 1\r\n",
  "delta\n",
  "echo",
  "foxtrot",
  "golf",
  "hotel",
  "india",
]


def test_folder(corpus):
  store = open_all(corpus)
  assert texts(store) == EVERYTHING
  assert store.num_tokens == store.lengths.sum()
  assert store.read(1, 1, 4).tolist() == list(b"rav")
  assert store.read(1, 1, 4).dtype == np.int32


def test_files_globs_and_lists(corpus):
  assert texts(open_all(corpus / "b.txt")) == ["bravo"]
  assert texts(open_all(corpus / "*.txt")) == ["bravo"]
  assert texts(open_all(f"{corpus}/**/*.*")) == EVERYTHING
  both = open_all(f"{corpus}/b.txt, {corpus}/sub/c.py")
  assert texts(both) == ["bravo", "c = 1\r\n"]


def test_relative_sources(corpus, monkeypatch):
  monkeypatch.chdir(corpus)
  assert texts(open_all("b.txt")) == ["bravo"]
  assert texts(open_all("*.md")) == ["älpha"]
  assert texts(open_all(".")) == EVERYTHING


def test_names_do_not_depend_on_where_the_corpus_is(corpus):
  found = [file.name for file in files_lib.find(str(corpus))]
  assert found == sorted(found)
  assert "sub/c.py" in found
  assert [f.name for f in files_lib.find(f"{corpus}/sub/*.py")] == ["c.py"]
  assert [f.name for f in files_lib.find(f"{corpus}/s*/*.py")] == ["sub/c.py"]


def test_fingerprint_is_of_the_documents(corpus):
  before = open_all(corpus).fingerprint
  assert before == open_all(corpus).fingerprint
  (corpus / "b.txt").write_bytes(b"brav0")
  assert open_all(corpus).fingerprint != before
  ab = open_all(corpus / "sub" / "d.jsonl")
  (corpus / "sub" / "d.jsonl").write_bytes(jsonl("delta\nec", "ho", "foxtrot"))
  assert open_all(corpus / "sub" / "d.jsonl").fingerprint != ab.fingerprint


def test_standard_library():
  files = files_lib.find("stdlib")
  names = {file.name for file in files}
  assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= names
  folders = {part for name in names for part in name.split("/")[:-1]}
  assert not folders & {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
  }
  assert not any(name.startswith("_sysconfigdata") for name in names)
  sizes = {
    split: sources.open_split(config_lib.DataConfig(), split).num_tokens
    for split in sources.SPLITS
  }
  assert 5e6 < sizes["train"] < 1.5e7  # 8.9 MB with Python 3.12
  assert 0.02 < sizes["validation"] / sizes["train"] < 0.1


def test_split_by_name(tmp_path):
  for i in range(100):
    (tmp_path / f"{i}.txt").write_text(f"text {i}")
  (tmp_path / "lines.jsonl").write_bytes(
    jsonl(*(f"line {i}" for i in range(100)))
  )
  split = {
    s: texts(sources.open_split(config(tmp_path, validation_share=0.3), s))
    for s in sources.SPLITS
  }
  assert sorted(split["train"] + split["validation"]) == sorted(
    texts(open_all(tmp_path))
  )
  assert 40 < len(split["validation"]) < 80
  assert any(t.startswith("line") for t in split["validation"])
  # Another file does not move those that were there.
  (tmp_path / "new.txt").write_text("new")
  again = texts(
    sources.open_split(config(tmp_path, validation_share=0.3), "train")
  )
  assert set(split["train"]) <= set(again)
  smaller = texts(
    sources.open_split(config(tmp_path, validation_share=0.1), "validation")
  )
  assert set(smaller) < set(split["validation"]) | {"new"}


def test_split_is_fixed_for_ever():
  chosen = [i for i in range(40) if sources.in_validation(f"{i}.txt", 0.1)]
  assert chosen == [1, 18, 20, 27, 39]


def test_named_validation(corpus):
  c = config(corpus / "b.txt", validation=str(corpus / "a.md"))
  assert texts(sources.open_split(c, "train")) == ["bravo"]
  assert texts(sources.open_split(c, "validation")) == ["älpha"]


def test_no_share_is_all_train(corpus):
  c = config(corpus, validation_share=0.0)
  assert texts(sources.open_split(c, "train")) == EVERYTHING
  with pytest.raises(
    errors.UserError, match=r"too few documents.*validation_share"
  ):
    sources.open_split(c, "validation")


def test_mixture(corpus):
  store = open_all(f"3:{corpus}/b.txt; 1 : {corpus}/a.md,{corpus}/sub/c.py")
  assert isinstance(store, store_lib.Mixture)
  assert store.weights == (0.75, 0.25)
  assert [texts(s) for s in store.stores] == [["bravo"], ["älpha", "c = 1\r\n"]]
  assert texts(store) == ["bravo", "älpha", "c = 1\r\n"]
  other = open_all(f"1:{corpus}/b.txt;1:{corpus}/a.md,{corpus}/sub/c.py")
  assert other.fingerprint != store.fingerprint


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("missing.txt", "no such file or folder; check data.source$"),
    ("missing.bin", "no such file or folder; check data.source$"),
    ("1:missing.txt", "no such file or folder; check data.source$"),
    ("*.txt", "matches no text file"),
    ("empty", "no text files in this folder"),
    ("", "data.source is empty"),
    (" , ", "data.source is empty"),
    ("x:a;0.3:b", "'x:a' is not weight:path"),
    ("0.7:a;0.3", "'0.3' is not weight:path"),
    ("0.7:a;", "'' is not weight:path"),
    ("0:a;1:b", "'0:a' is not weight:path"),
    ("-1:a;1:b", "'-1:a' is not weight:path"),
    ("nan:a;1:b", "'nan:a' is not weight:path"),
    ("inf:a;1:b", "'inf:a' is not weight:path"),
    ("0.5:;1:b", "'0.5:' is not weight:path"),
    ("1..2:a", "'1..2:a' is not weight:path"),
    ("1e308:a;1e308:b", "rounds to a share of 0"),
    ("1e-300:a;1e300:b", "rounds to a share of 0"),
  ],
)
def test_bad_sources(source, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "empty").mkdir()
  for name in "ab":
    (tmp_path / name).mkdir()
    (tmp_path / name / "x.txt").write_text("text")
  with pytest.raises(errors.UserError, match=message) as caught:
    open_all(source)
  assert "\n" not in str(caught.value)


def test_a_missing_validation_text_is_named(corpus):
  data = config_lib.DataConfig(source=corpus, validation="missing.txt")
  with pytest.raises(errors.UserError, match=r"check data\.validation$"):
    sources.open_split(data, "validation")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"packing": "first-fit"}, "data.packing: unknown 'first-fit'; use one of"),
    ({"sequence_length": 0}, "data.sequence_length: must be at least 1"),
    ({"validation_share": 1.0}, "data.validation_share: .* less than 1"),
    ({"validation_share": -0.1}, "data.validation_share: must be at least 0"),
    ({"validation_share": float("nan")}, "data.validation_share"),
    ({"prefetch": -1}, "data.prefetch=-1: give 0 or more"),
    ({"tokenizer": "bites"}, "unknown tokenizer 'bites'"),
  ],
)
def test_bad_settings(changes, message, corpus):
  with pytest.raises(errors.UserError, match=message) as caught:
    sources.open_split(config(corpus, **changes), "train")
  assert "\n" not in str(caught.value)


def test_one_file_cannot_be_split(corpus):
  with pytest.raises(errors.UserError, match=r"data\.validation$") as caught:
    for split in sources.SPLITS:
      sources.open_split(config(corpus / "b.txt"), split)
  assert "b.txt: too few documents for both" in str(caught.value)


def test_one_file_without_text(tmp_path):
  """It is not the split that leaves nothing."""
  path = tmp_path / "x.jsonl"
  path.write_text('{"text": ""}\n')
  with pytest.raises(errors.UserError, match=r"x\.jsonl: no text in it"):
    sources.open_split(config(path, validation_share=0.0), "train")


def test_unknown_split(corpus):
  with pytest.raises(ValueError, match="split must be one of"):
    sources.open_split(config(corpus), "test")
