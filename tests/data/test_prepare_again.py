"""Prepare that failed on its input begins anew once that is corrected."""

import pytest
from prepare_cases import contents, run

from memcomp import errors, lock
from memcomp.data import shards

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def text(tmp_path):
  """A text whose second line is broken; prepare has failed on it in `out`."""
  path = tmp_path / "text.jsonl"
  path.write_text('{"text": "good"}\n{oops}\n')
  with pytest.raises(errors.UserError, match=r"text\.jsonl:2: invalid JSON"):
    run(path, tmp_path / "out")
  path.write_text('{"text": "good"}\n{"text": "corrected"}\n')
  return path


def test_a_corrected_line_is_read(text, tmp_path):
  """The error names the line, so correcting it has to be enough."""
  run(text, tmp_path / "out")
  run(text, tmp_path / "clean")
  assert contents(tmp_path / "out") == contents(tmp_path / "clean")
  plans = [tmp_path / name / shards.PLAN for name in ("out", "clean")]
  assert plans[0].read_bytes() == plans[1].read_bytes()


def test_what_the_first_attempt_left_half_written_is_removed(text, tmp_path):
  """The second may have fewer files, which would not replace these."""
  names = "tokens-00007-000.arrayrecord.tmp", "units/00007.npz.tmp"
  for name in names:
    (tmp_path / "out" / name).touch()
  run(text, tmp_path / "out")
  assert not any((tmp_path / "out" / name).exists() for name in names)


@pytest.mark.parametrize(
  "left",
  [
    "tokens-00000-000.arrayrecord",
    "units/00000.json",
    "units/00000.npz",
    "manifest.json",
    # The folder of a worker of Beam, which may still run.
    "units/tmpabc",
  ],
)
def test_what_is_finished_keeps_its_plan(left, text, tmp_path):
  (tmp_path / "out" / left).touch()
  before = (tmp_path / "out" / shards.PLAN).read_bytes()
  with pytest.raises(errors.UserError, match="begun with another source"):
    run(text, tmp_path / "out")
  assert (tmp_path / "out" / shards.PLAN).read_bytes() == before


def test_the_plan_stays_while_another_process_works(text, tmp_path):
  before = (tmp_path / "out" / shards.PLAN).read_bytes()
  with (
    lock.hold(tmp_path / "out/.lock"),
    pytest.raises(errors.UserError, match="is being written by"),
  ):
    run(text, tmp_path / "out")
  assert (tmp_path / "out" / shards.PLAN).read_bytes() == before


def test_ids_without_text_make_no_folder(corpus, tmp_path):
  with pytest.raises(errors.UserError, match=r"--tokenizer=none: .*; give"):
    run(corpus, tmp_path / "out", tokenizer="none")
  assert not (tmp_path / "out").exists()
