"""MQAR as training rows: segments in their order, seeds as the authors'."""

import dataclasses
import hashlib

import numpy as np
import pytest

from memcomp.data.synthetic import mqar, mqar_task

SMALL = mqar_task.MqarConfig(
  vocab_size=64,
  train="16:2:7;32:4:5",
  test="16:2:4;48:8:3",
  mode="fast",
)
EXACT = {"mode": "exact"}


def test_seeds_are_the_authors():
  """Five training seeds first, then those of the tests."""
  config = mqar_task.MqarConfig(
    train=mqar_task.CURRICULA["based"].train,
    test=mqar_task.CURRICULA["based"].test,
  )
  train = config.seeds("train", mqar_task.SEED)
  assert train == [843828734, 914636141, 1228959102, 1840268610, 974319580]
  test = config.seeds("test", mqar_task.SEED)
  assert test[:2] == [2967327842, 2367878886] and len(test) == 7


def test_a_test_segment_has_a_seed_of_its_own():
  config = dataclasses.replace(SMALL, test="16:2:4;48:8:3;16:2:4")
  first, second, _ = config.seeds("test", 1)
  own, other = config.segments("test")[:2]
  assert (config.test_seed(own, 1), config.test_seed(other, 1)) == (
    first,
    second,
  )
  more = mqar_task.Segment(48, 8, 4)
  found = config.test_seed(more, 1)
  assert found == SMALL.test_seed(more, 1) >= 2**31  # training's are below
  assert found != config.test_seed(more, 2)
  assert found != config.test_seed(more._replace(pairs=7), 1)


def test_a_segment_is_the_benchmark_s():
  """Of the first examples of a segment with its own seed: exact mode."""
  config = mqar_task.MqarConfig(
    vocab_size=128, train="64:4:6", test="64:4:5;64:8:3"
  )
  config.validate()
  tokens, targets = config.examples("test", 1, 123)
  seed = config.seeds("test", 123)[1]
  want, labels = mqar.exact(
    vocab_size=128, num_examples=3, length=64, pairs=8, seed=seed
  )
  np.testing.assert_array_equal(tokens, want)
  np.testing.assert_array_equal(targets, np.where(labels < 0, -1, labels))
  assert config.label == "mqar"
  for other in ({"mode": "fast"}, {"random_filler": True}):
    assert mqar_task.MqarConfig(**other).label == "mqar-fast"


def test_published_slices():
  """Of zoology's configs: tokens, pairs and examples."""
  based = mqar_task.CURRICULA["based"]
  train = mqar_task.parse(based.train)
  assert [s[:2] for s in train] == [
    (64, 4),
    (128, 8),
    (256, 16),
    (256, 32),
    (256, 64),
  ]
  assert [s.examples for s in train] == [100_000, *[20_000] * 4]
  test = mqar_task.parse(based.test)
  assert [s[:2] for s in test] == [
    (64, 4),
    (64, 8),
    (64, 16),
    (128, 32),
    (256, 64),
    (512, 128),
    (1024, 256),
  ]
  assert {s.examples for s in test} == {1000}
  assert (based.batch_size, based.epochs) == (256, 32) and based.random_filler
  for length, pairs, batch in ((64, 4, 512), (128, 8, 512), (256, 16, 256)):
    one = mqar_task.CURRICULA[f"zoology{length}"]
    assert mqar_task.parse(one.train) == [(length, pairs, 100_000)]
    assert mqar_task.parse(one.test) == [(length, pairs, 3000)]
    assert (one.batch_size, one.epochs, one.random_filler) == (batch, 64, False)
  for name, one in mqar_task.CURRICULA.items():
    mqar_task.MqarConfig(train=one.train, test=one.test).validate()
    assert name


def test_segments_come_in_order_in_whole_batches_and_again():
  drawn = SMALL.rows("train", seed=1, batch_size=4, length=32)
  assert drawn.epoch == 8 + 8
  first, second = (SMALL.examples("train", n, 1) for n in (0, 1))
  for i in range(16):
    row, (tokens, targets) = drawn[i], second if i >= 8 else first
    place = i % 8
    assert len(row.tokens) == (32 if i >= 8 else 16)
    if place < len(tokens):
      np.testing.assert_array_equal(row.tokens, tokens[place])
      np.testing.assert_array_equal(row.targets, targets[place])
    else:
      assert (row.targets == -1).all() and not row.tokens.any()
    again = drawn[i + 5 * 16]
    np.testing.assert_array_equal(again.tokens, row.tokens)
  validation = SMALL.rows("validation", seed=1, batch_size=4, length=32)
  assert validation.epoch == 4 + 4 and len(validation[4].tokens) == 48
  assert validation[0].tokens.tobytes() != drawn[0].tokens.tobytes()


def test_random_filler_takes_the_place_of_zeros_alone():
  filled = dataclasses.replace(SMALL, random_filler=True)
  (plain, targets), (tokens, same) = (
    config.examples("train", 1, 0) for config in (SMALL, filled)
  )
  np.testing.assert_array_equal(targets, same)
  np.testing.assert_array_equal(tokens[plain > 0], plain[plain > 0])
  assert tokens[plain == 0].std() > 5 and tokens.max() < 64
  again = filled.examples("train", 1, 0)[0]
  assert hashlib.sha256(tokens).digest() == hashlib.sha256(again).digest()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"train": "16:2"}, r"train='16:2'.*LENGTH:PAIRS:EXAMPLES"),
    ({"test": "16:2:0"}, r"test='16:2:0'"),
    ({"test": "16:5:4"}, r"test=16:5:4: length=16"),
    ({"vocab_size": 16}, r"train=16:2:7: vocab_size=16"),
    ({"mode": "quick"}, r"mode='quick'.*exact, fast"),
    ({"power": 0.0}, r"power=0.0"),
    (EXACT | {"power": 300.0}, r"train=32:4:5: power=300\.0: .* 12 slots"),
    (EXACT | {"power": 270.0}, r"test=48:8:3: power=270\.0: .* 16 slots"),
    (
      EXACT | {"power": 5e-324},
      r"power=5e-324: .* overflows or underflows .*; give a power near",
    ),
    ({"power": 1e308}, r"power=1e\+308"),
  ],
)
def test_errors_name_the_field(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(SMALL, **changes).validate()


@pytest.mark.parametrize(
  ("mode", "power"),
  # There are 16 slots; a little more than the first overflows.
  [
    ("exact", 254.0),
    ("exact", 1e-300),
    ("exact", 100),  # of integers, which overflow beyond 2^63
    ("fast", 400.0),
    ("fast", 1e300),
  ],
)
def test_every_power_whose_law_is_finite_draws(mode, power):
  config = dataclasses.replace(
    SMALL, mode=mode, power=power, train="48:8:2", test="48:8:2"
  )
  config.validate()
  targets = config.examples("train", 0, 1)[1]
  assert ((targets >= 0).sum(1) == 8).all()
