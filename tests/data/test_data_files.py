"""Which files a source means: each once, and none left out in silence."""

import glob
import json
import os

import pytest

from memcomp import errors
from memcomp.data import files as files_lib
from memcomp.data import sources
from memcomp.data import tokenizer as tokenizer_lib

BYTES = tokenizer_lib.load("bytes")


def texts(source):
  store = sources.open_source(str(source), BYTES)
  return [
    BYTES.decode(store.read(i, 0, int(n))) for i, n in enumerate(store.lengths)
  ]


def find_names(source):
  return [file.name for file in files_lib.find(str(source))]


@pytest.fixture
def linked(tmp_path):
  """A corpus with links to its own folders and files, and one elsewhere."""
  folder, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
  (folder / "sub").mkdir(parents=True)
  elsewhere.mkdir()
  (folder / "a.txt").write_text("a")
  (folder / "sub/B.TXT").write_text("b")
  (elsewhere / "c.JSONL").write_bytes(json.dumps({"text": "c"}).encode())
  (folder / "again").symlink_to(".")
  (folder / "sub/up").symlink_to("..")
  (folder / "0.txt").symlink_to("a.txt")
  (folder / "hard.txt").hardlink_to(folder / "sub/B.TXT")
  (folder / "there").symlink_to(elsewhere)
  return folder


def test_each_file_is_read_once_whatever_links_lead_to_it(linked):
  # Called by its own place, not by that of a link.
  names = ["a.txt", "hard.txt", "there/c.JSONL"]
  assert find_names(linked) == names
  assert find_names(f"{linked}/**") == names
  assert find_names(f"{linked}/**/*.*") == names
  assert find_names(f"{linked}/**/*.txt") == names[:2]
  assert find_names(f"{linked}/*.txt") == names[:2]
  assert find_names(f"{linked}/*/*.TXT") == ["sub/B.TXT"]
  assert find_names(f"{linked}/*/*/up/sub/*.TXT") == ["again/sub/up/sub/B.TXT"]
  assert find_names(f"{linked}/there/**/*") == ["c.JSONL"]
  assert sorted(texts(linked)) == ["a", "b", "c"]
  # Nor does it matter how often a source names it.
  several = f"{linked}/sub/B.TXT,{linked},{linked}/**/*.txt,{linked}/again"
  assert sorted(texts(several)) == ["a", "b", "c"]


def test_a_file_of_two_parts_of_a_mixture_is_in_one_split(tmp_path):
  (tmp_path / "sub").mkdir()
  for number in range(40):
    (tmp_path / f"sub/{number}.txt").write_text(f"text {number}")
  # By their names below the second part alone, other files would be kept.
  source = f"0.5:{tmp_path};0.5:{tmp_path}/sub"

  def read(split):
    def keep(name):
      return sources.in_validation(name, 0.5) == (split == "validation")

    store = sources.open_source(source, BYTES, keep=keep)
    return [
      BYTES.decode(store.read(i, 0, int(n)))
      for i, n in enumerate(store.lengths)
    ]

  train, validation = read("train"), read("validation")
  assert len(train) + len(validation) == 80
  assert not set(train) & set(validation)


@pytest.fixture
def corpus(tmp_path):
  for name in ("sub", ".hidden"):
    (tmp_path / name).mkdir()
  names = "b.txt", "a.md", "image.png", ".c.txt", ".hidden/d.txt", "sub/e.py"
  for name in (*names, "sub/f.jsonl.gz", "sub/g.TXT.ZST"):
    (tmp_path / name).write_text("text")
  return tmp_path


def test_globs_are_those_of_the_standard_library(corpus):
  for pattern in ("*", "*/*", "**/*", "s?b/*.[jp]*", "**/sub/*", "sub/*", ".*"):
    expected = {
      os.path.relpath(path, corpus)
      for path in glob.glob(f"{corpus}/{pattern}", recursive=True)
      if os.path.isfile(path) and not path.endswith(".png")
    }
    found = {
      os.path.relpath(f.path, corpus)
      for f in files_lib.find(f"{corpus}/{pattern}")
    }
    assert found == expected, pattern


def shut(path):
  path.mkdir()


def dangling(path):
  path.symlink_to("nowhere")


def round_and_round(path):
  path.symlink_to(path.name)


def pipe(path):
  os.mkfifo(path)


@pytest.mark.parametrize(
  ("make", "name", "message"),
  [
    (shut, "shut", r"shut: cannot read this folder \(Permission denied\)"),
    (dangling, "b.txt", r"b\.txt: a link that leads nowhere"),
    (dangling, "disk2", "disk2: a link that leads nowhere"),
    (round_and_round, "loop.md", r"loop\.md: a link that leads nowhere"),
    (pipe, "pipe.txt", r"pipe\.txt: no regular file"),
  ],
)
@pytest.mark.parametrize("source", ["", "/**/*.txt", "/**/*"])
def test_nothing_is_left_out_in_silence(
  make, name, message, source, tmp_path, monkeypatch
):
  (tmp_path / "a.txt").write_text("a")
  make(tmp_path / name)
  real = os.listdir

  def refuse(folder):  # root may read everything
    if os.path.basename(folder) == "shut":
      raise PermissionError(13, "Permission denied", folder)
    return real(folder)

  monkeypatch.setattr(os, "listdir", refuse)
  with pytest.raises(errors.UserError, match=message) as caught:
    files_lib.find(f"{tmp_path}{source}")
  assert "\n" not in str(caught.value)
  # What is not asked for may be anything.
  assert find_names(f"{tmp_path}/a*.txt") == ["a.txt"]


def test_hidden_names_and_other_files_are_no_text(corpus):
  before = find_names(corpus)
  assert before == [
    "a.md",
    "b.txt",
    "sub/e.py",
    "sub/f.jsonl.gz",
    "sub/g.TXT.ZST",
  ]
  dangling(corpus / ".#lock")
  pipe(corpus / "socket")
  run = corpus / "run"
  (run / "eval").mkdir(parents=True)
  for name in ("config.json", "metrics.jsonl", "eval/samples.txt"):
    (run / name).write_text("of a run")
  assert find_names(corpus) == before
  # Who names it, wants it.
  assert find_names(run) == ["eval/samples.txt", "metrics.jsonl"]
