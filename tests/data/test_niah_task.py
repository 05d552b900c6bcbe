"""Rows of needles to train on: the answer is what is asked, and no more."""

import hashlib

import numpy as np
import pytest

from memcomp import config as config_lib
from memcomp import errors
from memcomp.data import sources
from memcomp.data.synthetic import niah, niah_task

# needle, context, seed, split -> of the first four rows.
GOLDEN = {
  ("single_1", 1024, 0, "train"): "df023bb4861b85ca",
  ("single_1", 1024, 0, "validation"): "e4520345d46afa72",
  ("single_1", 2048, 1, "train"): "132b6e38a114e52e",
  ("single_3", 4096, 0, "train"): "a27ee60a298eb69f",
}


def rows(needle, context, seed, split, length=0):
  config = niah_task.NiahConfig(needle=needle, context=context)
  config.validate()
  drawn = config.rows(split, seed=seed, batch_size=2, length=length)
  (own,) = config.lengths(split, length)
  return own, [drawn[i] for i in range(4)]


@pytest.mark.parametrize("arguments", list(GOLDEN))
def test_rows_stay_the_same(arguments):
  _, found = rows(*arguments)
  digest = hashlib.sha256()
  for row in found:
    digest.update(row.tokens.astype("<i4").tobytes())
    digest.update(row.targets.astype("<i4").tobytes())
  assert digest.hexdigest()[:16] == GOLDEN[arguments]


@pytest.mark.parametrize("needle", ["single_1", "single_2", "single_3"])
def test_the_answer_is_asked(needle):
  length, found = rows(needle, 4096, 3, "train")
  for row in found:
    assert row.tokens.shape == row.targets.shape == (length,)
    asked = row.targets >= 0
    answer = bytes(row.targets[asked].astype(np.uint8)).decode()
    value = answer.removeprefix(" ").removesuffix(".")
    assert answer == f" {value}." and len(value) in (7, 36)
    first = int(np.argmax(asked))
    text = bytes(row.tokens[: first + 1].astype(np.uint8)).decode()
    assert f"is: {value}." in text and text.endswith("provided text is")
    # Each byte of the answer is read before the next one is asked for.
    said = row.tokens[first + 1 : first + len(answer)]
    assert bytes(said.astype(np.uint8)).decode() == answer[:-1]
    assert not row.tokens[first + len(answer) :].any()


def test_rows_are_of_their_number_alone():
  config = niah_task.NiahConfig()
  a, b = (
    config.rows("train", seed=0, batch_size=n, length=1000) for n in (1, 8)
  )
  np.testing.assert_array_equal(a[5].tokens, b[5].tokens)
  assert len(a[5].tokens) == 1000
  assert not np.array_equal(a[5].tokens, a[6].tokens)


def test_all_rows_of_a_context_that_is_accepted_can_be_drawn():
  config = niah_task.NiahConfig(context=918)
  config.validate()
  rows = config.rows("train", seed=1, batch_size=1, length=0)
  (length,) = config.lengths("train")
  assert all(rows[i].tokens.size == length for i in range(48))


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"needle": "double"}, "needle='double' is not one of: single_1"),
    ({"context": 300}, "context=300: the smallest haystack takes"),
    ({"needle": "single_2"}, "context=1024: the smallest haystack"),
  ],
)
def test_impossible(change, said):
  with pytest.raises(ValueError, match=said):
    niah_task.NiahConfig(**change).validate()


def test_rows_of_a_config_that_nobody_checked(monkeypatch):
  monkeypatch.setattr(niah_task, "_ROW_TRIES", 200)
  rows = niah_task.NiahConfig(context=700).rows(
    "train", seed=0, batch_size=1, length=0
  )
  with pytest.raises(niah.DoesNotFitError, match="more than 700"):
    rows[0]


def test_its_ids_are_bytes():
  config = config_lib.DataConfig(
    task=niah_task.NiahConfig(), tokenizer="none", sequence_length=1024
  )
  with pytest.raises(errors.UserError, match=r"set data\.tokenizer to bytes"):
    sources.check(config)
