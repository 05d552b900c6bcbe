"""Rows laid by hand, and that no token is lost or doubled."""

import itertools

import numpy as np
import pytest

from memcomp import errors
from memcomp.data import order as order_lib
from memcomp.data import packing
from memcomp.data import store as store_lib


def make_store(lengths, *, first=1):
  """Documents of consecutive numbers, so that each token names its place."""
  lengths = np.array(lengths)
  tokens = np.arange(first, first + lengths.sum(), dtype=np.uint32)
  return store_lib.ArrayStore("made", tokens, lengths)


def rows_of(plan):
  return [plan[i] for i in range(len(plan))]


def assert_row(row, *, tokens, targets, segment_ids, positions):
  assert row.tokens.tolist() == tokens
  assert row.targets.tolist() == targets
  assert row.segment_ids.tolist() == segment_ids
  assert row.positions.tolist() == positions
  assert all(field.dtype == np.int32 for field in row)


# Documents: 1 2 3 | 4 5 | 6 7 8 9 10 11 12.
HAND = (3, 2, 7)


def test_joined_by_hand():
  plan = packing.Joined(make_store(HAND), 4)
  assert len(plan) == 2  # the third row would need a thirteenth token
  assert_row(
    plan[0],
    tokens=[1, 2, 3, 4],
    targets=[2, 3, 4, 5],
    segment_ids=[1, 1, 1, 1],
    positions=[0, 1, 2, 3],
  )
  assert_row(
    plan[1],
    tokens=[5, 6, 7, 8],
    targets=[6, 7, 8, 9],
    segment_ids=[1, 1, 1, 1],
    positions=[0, 1, 2, 3],
  )


def test_concat_by_hand():
  plan = packing.Concat(make_store(HAND), 4)
  assert len(plan) == 2
  assert_row(
    plan[0],
    tokens=[1, 2, 3, 4],
    targets=[2, 3, -1, 5],
    segment_ids=[1, 1, 1, 2],
    positions=[0, 1, 2, 0],
  )
  assert_row(
    plan[1],
    tokens=[5, 6, 7, 8],
    targets=[-1, 7, 8, 9],
    segment_ids=[1, 2, 2, 2],
    positions=[0, 0, 1, 2],
  )


def test_first_fit_by_hand(monkeypatch):
  monkeypatch.setattr(order_lib, "permutation", lambda n, *key: np.arange(n))
  plan = packing.FirstFit(make_store(HAND), 4, seed=0)
  assert len(plan) == 4  # 1-3 | 4 5 | 6-9 | 10-12
  assert_row(
    plan[0],
    tokens=[1, 2, 3, 0],
    targets=[2, 3, -1, -1],
    segment_ids=[1, 1, 1, 0],
    positions=[0, 1, 2, 0],
  )
  assert_row(
    plan[2],
    tokens=[6, 7, 8, 9],
    targets=[7, 8, 9, 10],
    segment_ids=[1, 1, 1, 1],
    positions=[0, 1, 2, 3],
  )
  assert_row(
    plan[3],
    tokens=[10, 11, 12, 0],
    targets=[11, 12, -1, -1],
    segment_ids=[1, 1, 1, 0],
    positions=[0, 1, 2, 0],
  )


def test_first_fit_shares_a_row(monkeypatch):
  monkeypatch.setattr(order_lib, "permutation", lambda n, *key: np.arange(n))
  plan = packing.FirstFit(make_store((3, 4, 1, 2)), 5, seed=0)
  assert len(plan) == 3
  assert_row(
    plan[0],
    tokens=[1, 2, 3, 8, 0],
    targets=[2, 3, -1, -1, -1],
    segment_ids=[1, 1, 1, 2, 0],
    positions=[0, 1, 2, 0, 0],
  )


def test_stream_by_hand():
  # Part 0: 1 2 3 | 4 5 | 6; part 1: 7 8 9 10 11 12.
  plan = packing.Stream(
    make_store(HAND), 4, num_streams=2, seed=0, shuffle=False
  )
  assert plan.steps_per_epoch == 2
  assert_row(
    plan[0],
    tokens=[1, 2, 3, 4],
    targets=[2, 3, -1, 5],
    segment_ids=[1, 1, 1, 2],
    positions=[0, 1, 2, 0],
  )
  assert_row(
    plan[1],
    tokens=[7, 8, 9, 10],
    targets=[8, 9, 10, 11],
    segment_ids=[3, 3, 3, 3],
    positions=[1, 2, 3, 4],
  )
  assert_row(
    plan[2],
    tokens=[5, 6, 0, 0],
    targets=[-1, 7, -1, -1],
    segment_ids=[2, 3, 0, 0],
    positions=[1, 0, 0, 0],
  )
  assert_row(
    plan[3],
    tokens=[11, 12, 0, 0],
    targets=[12, -1, -1, -1],
    segment_ids=[3, 3, 0, 0],
    positions=[5, 6, 0, 0],
  )


def random_lengths(seed):
  generator = np.random.default_rng(seed)
  return generator.integers(1, 40, generator.integers(3, 30))


def check_tokens_once(rows, store, *, dropped=0, crossing=False):
  """Each token once; its target is the next of its document."""
  total = store.num_tokens
  tokens = np.concatenate([r.tokens for r in rows])
  targets = np.concatenate([r.targets for r in rows])
  real = np.concatenate([r.segment_ids for r in rows]) > 0
  assert (tokens[~real] == 0).all()
  assert (targets[~real] == -1).all()
  assert sorted(tokens[real].tolist()) == list(range(1, total - dropped + 1))
  last = np.cumsum(store.lengths)
  expected = np.where(np.isin(tokens, last), -1, tokens + 1)
  if crossing:
    expected = tokens + 1
  np.testing.assert_array_equal(targets[real], expected[real])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length", [1, 5, 16])
def test_every_token_once(seed, length):
  store = make_store(random_lengths(seed))
  dropped = store.num_tokens - (store.num_tokens - 1) // length * length
  joined = rows_of(packing.Joined(store, length))
  check_tokens_once(joined, store, dropped=dropped, crossing=True)
  concat = rows_of(packing.Concat(store, length))
  check_tokens_once(concat, store, dropped=dropped)
  fitted = rows_of(packing.FirstFit(store, length, seed=seed))
  check_tokens_once(fitted, store)
  for shuffle in (False, True):
    stream = packing.Stream(
      store, length, num_streams=3, seed=seed, shuffle=shuffle
    )
    rows = [
      plan_row for plan_row in map(stream.__getitem__, range(len(stream)))
    ]
    check_tokens_once(rows, store)
    later = [stream[i + 5 * len(stream)] for i in range(len(stream))]
    check_tokens_once(later, store)


@pytest.mark.parametrize("seed", range(4))
def test_stream_continues_documents(seed):
  """Windows put end to end are documents, positions and ids included."""
  store = make_store(random_lengths(seed))
  plan = packing.Stream(store, 7, num_streams=2, seed=seed, shuffle=True)
  starts = np.cumsum(store.lengths) - store.lengths
  seen = {}
  for stream in range(2):
    rows = [plan[s * 2 + stream] for s in range(plan.steps_per_epoch)]
    tokens, _, ids, positions = (
      np.concatenate(f) for f in zip(*rows, strict=True)
    )
    real = ids > 0
    assert not real[np.argmin(real) :].any() or real.all()  # padding ends it
    tokens, ids, positions = tokens[real], ids[real], positions[real]
    document = np.searchsorted(np.cumsum(store.lengths), tokens, side="left")
    np.testing.assert_array_equal(positions, tokens - 1 - starts[document])
    for d, i in zip(document.tolist(), ids.tolist(), strict=True):
      assert seen.setdefault(d, i) == i
  assert len(set(seen.values())) == len(store.lengths)


def test_stream_epochs_differ_in_order_and_ids():
  store = make_store([5] * 20)
  plan = packing.Stream(store, 10, num_streams=2, seed=3, shuffle=True)
  first, second, third = (
    [plan[e * len(plan) + i] for i in range(len(plan))] for e in range(3)
  )
  ids = [
    {int(i) for r in rows for i in r.segment_ids}
    for rows in (first, second, third)
  ]
  assert not ids[0] & ids[1]  # a document is never its own continuation
  assert ids[0] == ids[2]
  orders = [
    np.concatenate([r.tokens for r in rows]) for rows in (first, second, third)
  ]
  assert not np.array_equal(orders[0], orders[1])
  assert not np.array_equal(orders[0], orders[2])
  other = packing.Stream(store, 10, num_streams=2, seed=4, shuffle=True)
  assert not np.array_equal(other[0].tokens, plan[0].tokens)


def test_stream_parts_are_equal():
  store = make_store([101])
  plan = packing.Stream(store, 10, num_streams=4, seed=0, shuffle=False)
  sizes = [
    sum(
      (plan[s * 4 + b].segment_ids > 0).sum()
      for s in range(plan.steps_per_epoch)
    )
    for b in range(4)
  ]
  assert max(sizes) - min(sizes) <= 1
  assert plan.steps_per_epoch == 3


def test_stretches_by_hand():
  # Stretches of two windows of two tokens: 1 2 | 3 4, 5 6 | 7 8, 9 10 | 11 12.
  plan = packing.Stretches(
    make_store(HAND), 2, num_streams=2, seed=0, windows=2
  )
  order = order_lib.permutation(3, "stretches", 0, 0).tolist()
  order += order_lib.permutation(3, "stretches", 0, 1).tolist()
  starts = []
  for turn in range(3):  # Of two streams: two epochs of three stretches.
    for stream in range(2):
      first, second = (plan[(2 * turn + w) * 2 + stream] for w in (0, 1))
      assert second.tokens[0] == first.tokens[1] + 1
      starts.append(int(first.tokens[0]))
  assert starts == [1 + 4 * i for i in order]
  row = next(
    plan[4 * t + s] for t in (0, 1) for s in (0, 1) if (order[2 * t + s] == 1)
  )
  assert row.tokens.tolist() == [5, 6]
  assert row.targets.tolist() == [-1, 7]
  assert row.positions.tolist() == [1, 0]
  assert row.segment_ids.tolist() in ([2, 3], [5, 6])


@pytest.mark.parametrize("seed", range(3))
def test_stretches_read_everything_once_an_epoch(seed):
  store = make_store(random_lengths(seed))
  plan = packing.Stretches(store, 7, num_streams=3, seed=seed, windows=4)
  per_stream = [
    [plan[s * 3 + b] for s in range(4 * plan.steps_per_epoch)] for b in range(3)
  ]
  tokens = np.concatenate(
    [r.tokens[r.segment_ids > 0] for rows in per_stream for r in rows]
  )
  _, counts = np.unique(tokens, return_counts=True)
  assert len(counts) == store.num_tokens
  assert counts.min() >= 3 and counts.max() - counts.min() <= 1
  jumps = 0
  for rows in per_stream:
    for number, (a, b) in enumerate(itertools.pairwise(rows), 1):
      if not a.segment_ids[-1] or not b.segment_ids[0]:
        continue
      follows = b.tokens[0] == a.tokens[-1] + 1
      if number % 4:
        assert follows
        assert (a.segment_ids[-1] == b.segment_ids[0]) == (
          a.targets[-1] == b.tokens[0]
        )
      else:  # A jump is never taken for a continuation.
        jumps += not follows
        assert a.segment_ids[-1] != b.segment_ids[0]
  assert jumps


def test_first_fit_depends_on_the_seed_alone():
  store = make_store(random_lengths(1))
  a, b, c = (
    rows_of(packing.FirstFit(store, 64, seed=seed)) for seed in (5, 5, 6)
  )
  assert all(
    np.array_equal(x, y)
    for r, s in zip(a, b, strict=True)
    for x, y in zip(r, s, strict=True)
  )
  assert any(
    not np.array_equal(r.tokens, s.tokens) for r, s in zip(a, c, strict=False)
  )


def test_permutation_is_fixed_for_ever():
  # A resumed run on another version has to see the same order.
  assert order_lib.permutation(8, "stream", 0, 0).tolist() == [
    1,
    3,
    0,
    5,
    4,
    6,
    7,
    2,
  ]
  order = order_lib.permutation(1000, "x", 1)
  assert sorted(order.tolist()) == list(range(1000))
  assert not np.array_equal(order, order_lib.permutation(1000, "x", 2))


@pytest.mark.parametrize("make", [packing.Joined, packing.Concat])
def test_fewer_tokens_than_a_row(make):
  assert len(make(make_store([9]), 8)) == 1
  with pytest.raises(errors.UserError, match="8 tokens are fewer than one row"):
    make(make_store([8]), 8)


def test_too_little_for_the_streams():
  with pytest.raises(errors.UserError, match="3 tokens cannot feed 4 streams"):
    packing.Stream(make_store([3]), 8, num_streams=4, seed=0, shuffle=True)


def test_no_tokens():
  with pytest.raises(errors.UserError, match="no tokens"):
    packing.FirstFit(make_store([]), 8, seed=0)


def test_rows_outside_the_plan():
  plan = packing.Joined(make_store([20]), 4)
  with pytest.raises(IndexError):
    plan[len(plan)]
  with pytest.raises(IndexError):
    plan[-1]


@pytest.mark.parametrize(
  "plan",
  [
    lambda store: packing.Concat(store, 4),
    lambda store: packing.FirstFit(store, 4, seed=0),
    lambda store: packing.Stream(
      store, 4, num_streams=2, seed=0, shuffle=False
    ),
  ],
)
def test_nothing_to_predict(plan):
  """The first token of a document is not predicted, and it has no second."""
  with pytest.raises(errors.UserError, match=r"nothing to score.*10 documents"):
    plan(make_store([1] * 10))
  # One is enough, and where documents are joined there is something, too.
  assert any(
    (row.targets >= 0).any() for row in rows_of(plan(make_store([2] + [1] * 8)))
  )
  assert (packing.Joined(make_store([1] * 10), 4)[0].targets >= 0).all()
