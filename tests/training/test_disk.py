"""Files and folders that several processes write at once are whole."""

import threading

import pytest

from memcomp import disk, errors, integrity


def test_one_of_two_makes_a_folder(tmp_path):
  out = tmp_path / "a" / "out"
  with disk.new_folder(out) as partial:
    (partial / "file").write_text("first")
    with (
      pytest.raises(errors.UserError, match="is being written by a running"),
      disk.new_folder(out),
    ):
      raise AssertionError
    assert (partial / "file").exists()
  assert [p.name for p in out.parent.iterdir()] == ["out"]
  with (
    pytest.raises(errors.UserError, match="is there already"),
    disk.new_folder(out),
  ):
    raise AssertionError
  assert (out / "file").read_text() == "first"


def test_one_that_comes_late_keeps_the_first(tmp_path, monkeypatch):
  """It has looked before the first was done."""
  out = tmp_path / "out"
  looked = []

  def meanwhile(path):
    if not looked:
      looked.append(path)
      path.mkdir()
      (path / "file").write_text("first")
    elif path.exists():
      raise errors.UserError("there already")

  monkeypatch.setattr(disk, "require_free", meanwhile)
  with pytest.raises(errors.UserError, match="there already"):
    disk.new_folder(out).__enter__()
  assert (out / "file").read_text() == "first"


def test_a_file_that_many_replace_is_one_of_theirs(tmp_path):
  path, texts = tmp_path / "file", [x * 200_000 for x in "abcd"]
  failed = []

  def replace(text):
    try:
      for _ in range(20):
        integrity.replace_text(path, text)
    except OSError as error:
      failed.append(error)

  threads = [threading.Thread(target=replace, args=(x,)) for x in texts]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not failed
  assert path.read_text() in texts
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()])
def test_a_file_that_is_not_finished_leaves_the_one_before(error, tmp_path):
  path = tmp_path / "file"
  path.write_text("before")
  with pytest.raises(type(error)), disk.replacing(path) as temporary:
    temporary.write_text("half")
    raise error
  assert path.read_text() == "before"
  assert list(tmp_path.iterdir()) == [path]
