"""Rows of recall: what is told, when it is asked, and that seeds are all."""

import hashlib
import random

import numpy as np
import pytest

from memcomp.data.synthetic import recall

# gap, episodes, pairs, symbols, seed, split -> of the first eight rows.
GOLDEN = {
  (24, 6, 1, 16, 0, "train"): "7ded1830b2227deb",
  (24, 6, 1, 16, 0, "test"): "88ca71f504fe67f9",
  (24, 6, 2, 16, 1, "validation"): "32a470de94642c46",
  (512, 1, 1, 16, 0, "train"): "548cc2dfc27d6130",
}


def rows(gap, episodes, pairs, symbols, seed, split, *, count=8, length=0):
  config = recall.RecallConfig(
    gap=gap, episodes=episodes, pairs=pairs, symbols=symbols
  )
  config.validate()
  drawn = config.rows(split, seed=seed, batch_size=4, length=length)
  return config, [drawn[i] for i in range(count)]


@pytest.mark.parametrize("arguments", list(GOLDEN))
def test_rows_stay_the_same(arguments):
  _, found = rows(*arguments)
  digest = hashlib.sha256()
  for row in found:
    digest.update(row.tokens.astype("<i4").tobytes())
    digest.update(row.targets.astype("<i4").tobytes())
  assert digest.hexdigest()[:16] == GOLDEN[arguments]


@pytest.mark.parametrize(
  ("gap", "pairs", "length"),
  [(24, 1, 199), (36, 1, 271), (48, 1, 343), (24, 2, 217), (0, 3, 91)],
)
def test_rows_tell_and_ask(gap, pairs, length):
  """Of the lengths that the paper's sizes of state come from."""
  config, found = rows(gap, 6, pairs, 16, 3, "train", count=40)
  assert config.tokens() == length and config.lengths("train") == [length]
  chosen = set()
  for row in found:
    assert row.tokens.shape == row.targets.shape == (length,)
    assert row.tokens[0] == recall.BOS
    parts = row.tokens[1:].reshape(6, -1)
    targets = row.targets[1:].reshape(6, -1)
    for tokens, target in zip(parts, targets, strict=True):
      told = tokens[: 3 * pairs].reshape(pairs, 3)
      assert (told[:, 0] == recall.STORE).all()
      keys, values = told[:, 1].tolist(), told[:, 2].tolist()
      assert len(set(keys)) == pairs
      assert set(keys) <= set(range(6, 22))
      assert set(values) <= set(range(22, 38))
      assert set(tokens[3 * pairs :][:gap].tolist()) <= set(range(38, 54))
      query, key, ans, value, sep, pad = tokens[3 * pairs + gap :].tolist()
      special = recall.QUERY, recall.ANS, recall.SEP, recall.PAD
      assert (query, ans, sep, pad) == special
      assert value == values[keys.index(key)]
      chosen.add(keys.index(key))
      # Only at ANS, which the value follows.
      (asked,) = np.flatnonzero(target >= 0)
      assert tokens[asked] == recall.ANS and target[asked] == value
  assert chosen == set(range(pairs))
  assert config.ids() == 54


def test_keys_and_values_are_uniform():
  _, found = rows(0, 200, 2, 4, 0, "train", count=30)
  told = np.concatenate(
    [row.tokens[1:].reshape(200, -1)[:, :6].reshape(-1, 3) for row in found]
  )
  for column in (1, 2):
    counts = np.unique(told[:, column], return_counts=True)[1]
    assert len(counts) == 4
    # Five deviations of a count.
    assert abs(counts - 3000).max() < 5 * (12000 * 3 / 16) ** 0.5


def test_seed_split_and_place_are_all_that_rows_depend_on():
  random.seed(1)
  np.random.seed(1)
  before = random.getstate(), np.random.get_state()[1].copy()
  _, first = rows(8, 2, 1, 16, 0, "train")
  _, again = rows(8, 2, 1, 16, 0, "train")
  assert random.getstate() == before[0]
  assert (np.random.get_state()[1] == before[1]).all()
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
  others = [
    row.tokens.tobytes()
    for seed, split in ((1, "train"), (0, "validation"), (0, "test"))
    for row in rows(8, 2, 1, 16, seed, split)[1]
  ]
  assert len({row.tokens.tobytes() for row in first} | set(others)) == 32


def test_rows_are_padded_behind():
  _, short = rows(5, 1, 1, 16, 0, "train")
  config, long = rows(5, 1, 1, 16, 0, "train", length=20)
  assert config.lengths("train", 20) == [20]
  for a, b in zip(short, long, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens[:15])
    assert (b.tokens[15:] == recall.PAD).all()
    assert (b.targets[15:] == -1).all()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"gap": -1}, "gap=-1"),
    ({"episodes": 0}, "episodes=0"),
    ({"symbols": 1}, "symbols=1"),
    ({"pairs": 0}, "pairs=0"),
    ({"pairs": 17}, r"pairs=17.*symbols=16"),
  ],
)
def test_errors_name_the_field(changes, message):
  with pytest.raises(ValueError, match=message):
    recall.RecallConfig(**changes).validate()
