"""MQAR: the authors' stream to the last bit, and its distribution."""

import hashlib

import numpy as np
import pytest

from memcomp.data.synthetic import mqar

# vocab, examples, length, pairs, seed -> of zoology's own output.
GOLDEN = {
  (8192, 64, 64, 4, 0): "ffe2b1d3d8797fce",
  (8192, 64, 256, 64, 1): "f4dc83ecb7a12a9f",
  (8192, 16, 512, 64, 123): "3fc64b13f9d808fd",
  (64, 32, 32, 8, 7): "90fa28da10ca4046",
}


def draw(function, vocab_size, num_examples, length, pairs, seed, **changes):
  return function(
    vocab_size=vocab_size,
    num_examples=num_examples,
    length=length,
    pairs=pairs,
    seed=seed,
    **changes,
  )


@pytest.mark.parametrize("arguments", list(GOLDEN))
def test_exact_is_the_benchmark_s_stream(arguments):
  inputs, labels = draw(mqar.exact, *arguments)
  data = inputs.astype("<i8").tobytes() + labels.astype("<i8").tobytes()
  assert hashlib.sha256(data).hexdigest()[:16] == GOLDEN[arguments]


@pytest.mark.parametrize("function", [mqar.exact, mqar.fast])
@pytest.mark.parametrize("arguments", list(GOLDEN))
def test_every_key_is_asked_for_once(function, arguments):
  vocab, examples, length, pairs, _ = arguments
  inputs, labels = draw(function, *arguments)
  assert inputs.shape == labels.shape == (examples, length)
  for x, y in zip(inputs, labels, strict=True):
    keys, values = x[: 2 * pairs : 2], x[1 : 2 * pairs : 2]
    assert len(set(keys)) == len(set(values)) == pairs
    assert keys.min() >= 1 and keys.max() < vocab // 2 <= values.min()
    assert values.max() < vocab
    asked = np.flatnonzero(y != mqar.IGNORED)
    assert asked.min() >= 2 * pairs and not np.any(asked % 2)
    told = dict(zip(keys, values, strict=True))
    assert {x[t]: y[t] for t in asked} == told
    rest = np.delete(x, asked)[2 * pairs :]
    assert not np.any(rest)


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_fast_has_the_distribution_of_exact(power):
  """Mean slot of each pair's question, and of every token, to 4 errors."""
  arguments = (256, 3000, 64, 4, 5)

  def moments(function):
    inputs, labels = draw(function, *arguments, power=power)
    slots = np.zeros((3000, 4))
    for i in range(4):
      asked = (inputs == inputs[:, 2 * i, None]) & (labels != mqar.IGNORED)
      slots[:, i] = (np.argmax(asked, axis=1) - 8) / 2
    return slots, inputs[:, :8]

  (exact, told), (fast, told_fast) = moments(mqar.exact), moments(mqar.fast)
  for a, b in ((exact, fast), (told, told_fast)):
    error = np.sqrt((a.var(axis=0) + b.var(axis=0)) / 3000)
    assert np.all(np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4 * error)
  # The law, not a uniform one: the first key's question comes early.
  assert (exact[:, 0].mean() < 8) == (power < 1)


def test_fast_draws_rows_that_hardly_fit():
  """31 of 63 keys: almost no row is distinct at the first draw."""
  inputs, _ = draw(mqar.fast, 128, 50, 124, 31, 0)
  assert all(len(set(row[:62:2])) == 31 for row in inputs)


def test_seeds_give_other_rows_and_the_same_again():
  arguments = (64, 8, 32, 4)
  first = draw(mqar.fast, *arguments, 1)[0]
  np.testing.assert_array_equal(first, draw(mqar.fast, *arguments, 1)[0])
  assert np.any(first != draw(mqar.fast, *arguments, 2)[0])


@pytest.mark.parametrize(
  ("changes", "name"),
  [
    ({"pairs": 0}, "pairs=0"),
    ({"length": 31}, "length=31"),
    ({"pairs": 9}, "length=32"),
    ({"vocab_size": 32}, "vocab_size=32"),
  ],
)
def test_errors_name_the_argument(changes, name):
  arguments = {
    "vocab_size": 64,
    "num_examples": 2,
    "length": 32,
    "pairs": 4,
    "seed": 0,
  }
  with pytest.raises(ValueError, match=name):
    mqar.fast(**arguments | changes)


def test_a_law_that_is_not_finite_is_named():
  with pytest.raises(ValueError, match=r"power=400\.0: .* overflows"):
    draw(mqar.exact, 8192, 2, 64, 16, 0, power=400.0)
  with pytest.raises(ValueError, match=r"power=inf: .* overflows"):
    draw(mqar.fast, 8192, 2, 64, 16, 0, power=float("inf"))
