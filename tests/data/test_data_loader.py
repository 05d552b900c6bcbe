"""Batches: their order, what they are mixed of, and the thread that reads."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from loader_cases import (
  EVERY,
  LENGTH,
  STORES,
  assert_equal,
  make,
  make_mixture,
  make_store,
  take,
)

from memcomp import errors
from memcomp.data import loader as loader_lib
from memcomp.data import store as store_lib


@EVERY
@pytest.mark.parametrize("store", STORES)
def test_shapes_and_determinism(pack, store):
  with (
    make(STORES[store](), packing=pack) as a,
    make(STORES[store](), packing=pack, prefetch=3) as b,
  ):
    batches = take(a, 12)
    assert_equal(batches, take(b, 12))
  for batch in batches:
    assert all(f.shape == (8, LENGTH) and f.dtype == np.int32 for f in batch)


@EVERY
def test_seed_changes_the_order(pack):
  with make(packing=pack) as a, make(packing=pack, seed=1) as b:
    assert not np.array_equal(next(a).tokens, next(b).tokens)


@pytest.mark.parametrize("pack", ["joined", "concat", "first_fit"])
def test_every_row_once_an_epoch(pack):
  """Batches straddle the ends of epochs; rows are neither lost nor doubled."""
  store = make_store()
  with make(store, packing=pack, batch_size=5) as loader:
    size = loader.rows_per_epoch
    assert size % 5
    rows = np.concatenate([b.tokens for b in take(loader, 3 * size // 5 + 1)])
  epochs = [
    sorted(map(tuple, rows[i * size : (i + 1) * size])) for i in range(3)
  ]
  with make(store, packing=pack, batch_size=4, shuffle=False) as loader:
    ordered = np.concatenate([b.tokens for b in loader])[:size]
  assert epochs[0] == epochs[1] == epochs[2] == sorted(map(tuple, ordered))
  assert not np.array_equal(rows[:size], ordered)
  assert not np.array_equal(rows[:size], rows[size : 2 * size])


def test_epochs_are_not_another_seeds_epochs():
  """Grain adds the epoch to the seed: seeds used as they are would overlap."""
  store = make_store()
  with make(store, batch_size=1) as a, make(store, batch_size=1, seed=1) as b:
    size = a.rows_per_epoch
    second = [r.tokens.tolist() for r in take(a, 2 * size)[size:]]
    first = [r.tokens.tolist() for r in take(b, size)]
  assert second != first


@pytest.mark.parametrize("store", STORES)
@EVERY
def test_one_pass_in_order(pack, store):
  settings = {"packing": pack, "shuffle": False, "batch_size": 16}
  with make(STORES[store](), **settings) as loader:
    batches = list(loader)
    with pytest.raises(StopIteration):
      next(loader)
    rows = loader.rows_per_epoch
  assert len(batches) == -(-rows // 16)
  tokens, targets, ids, _ = (
    np.concatenate(f) for f in zip(*batches, strict=True)
  )
  if pack != "stream":
    assert (ids[rows:] == 0).all()
    assert (targets[rows:] == -1).all()
    assert ids[:rows].any(axis=1).all()
  real = tokens[ids > 0]
  assert len(np.unique(real)) == len(real)
  if store == "one" and pack in ("joined", "concat"):
    assert real.tolist() == list(range(len(real)))


def test_stream_continues_through_the_loader():
  """The row after the last token of a batch starts with its target."""
  with make(packing="stream", batch_size=4, prefetch=2) as loader:
    steps = loader.rows_per_epoch // 4
    batches = take(loader, 2 * steps)
  followed = 0
  for before, after in itertools.pairwise(batches[:steps]):
    same = (before.segment_ids[:, -1] == after.segment_ids[:, 0]) & (
      after.segment_ids[:, 0] > 0
    )
    followed += same.sum()
    np.testing.assert_array_equal(
      before.targets[same, -1], after.tokens[same, 0]
    )
    np.testing.assert_array_equal(
      before.positions[same, -1] + 1, after.positions[same, 0]
    )
    ended = (after.positions[:, 0] == 0) & (after.segment_ids[:, 0] > 0)
    assert (before.targets[ended, -1] == -1).all()
  assert followed > 5
  last, first = batches[steps - 1].segment_ids, batches[steps].segment_ids
  assert not set(last.ravel()) - {0} & set(first.ravel())


def test_validation_reads_on_without_jumps():
  given = {"packing": "stream", "batch_size": 4, "shuffle": False}
  with make(**given) as plain, make(**given, stretch=2) as stretched:
    for a, b in zip(list(plain), list(stretched), strict=True):
      np.testing.assert_array_equal(a.tokens, b.tokens)
      np.testing.assert_array_equal(a.segment_ids, b.segment_ids)


def count_parts(batches):
  starts = np.concatenate([b.tokens[:, 0] for b in batches])
  return np.bincount(starts >= 10_000, minlength=2)


@pytest.mark.parametrize("pack", ["joined", "concat", "first_fit"])
def test_mixture_frequencies(pack):
  with make(make_mixture(), packing=pack) as loader:
    batches = take(loader, 50)
  for upto in (5, 20, 50):  # not only in the long run
    first, second = count_parts(batches[:upto])
    assert abs(second - 0.25 * (first + second)) <= 2


def test_mixture_of_streams():
  with make(make_mixture(), packing="stream") as loader:
    batches = take(loader, 60)
  for batch in batches:
    real = batch.segment_ids > 0
    large = batch.tokens >= 10_000
    assert (large[real] == (np.nonzero(real)[0] >= 6)).all()  # 6 of 8 rows
  first = {int(i) for b in batches for i in b.segment_ids[:6].ravel()} - {0}
  second = {int(i) for b in batches for i in b.segment_ids[6:].ravel()} - {0}
  assert not first & second


def test_ordered_mixture_starts_in_proportion():
  with make(make_mixture(), shuffle=False, batch_size=4) as loader:
    batches = list(loader)
  assert count_parts(batches[:5]).tolist() == [15, 5]


def test_mixture_components_have_orders_of_their_own():
  """Equal parts under one seed are not drawn in lock step."""
  store = store_lib.Mixture(
    [make_store(200), make_store(200, first=10_000)], [1, 1]
  )
  with make(store, batch_size=1) as loader:
    rows = np.stack([b.tokens[0, 0] for b in take(loader, 60)])
  assert (rows[rows < 10_000] != rows[rows >= 10_000] - 10_000).any()


def test_share_out():
  assert loader_lib.share_out(8, [0.75, 0.25]).tolist() == [6, 2]
  assert loader_lib.share_out(10, [1, 1, 1]).tolist() == [4, 3, 3]
  assert loader_lib.share_out(3, [0.98, 0.01, 0.01]).tolist() == [3, 0, 0]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"batch_size": 0}, "batch_size: must be at least 1"),
    ({"prefetch": -1}, "data.prefetch"),
    ({"packing": "tight"}, "data.packing"),
    ({"sequence_length": 0}, "data.sequence_length"),
    ({"stretch": -1, "packing": "stream"}, "data.stretch"),
    ({"stretch": 2}, "data.packing to stream"),
    ({"sequence_length": 9999}, "fewer than one row"),
    (
      {"store": make_mixture(), "packing": "stream", "batch_size": 1},
      "too few",
    ),
  ],
)
def test_bad_settings(arguments, message):
  with pytest.raises(errors.UserError, match=message) as caught:
    make(**arguments)
  assert "\n" not in str(caught.value)


class Broken(store_lib.ArrayStore):
  def read(self, document, start, stop):
    raise errors.UserError("shard 7: corrupt")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_the_reader_arrive(prefetch):
  store = Broken("broken", np.zeros(99, np.uint8), [99])
  with (
    make(store, prefetch=prefetch) as loader,
    pytest.raises(errors.UserError, match="shard 7: corrupt"),
  ):
    next(loader)


def reader_threads():
  return [t for t in threading.enumerate() if "prefetch" in t.name]


def test_close_ends_the_thread():
  loader = make(prefetch=2)
  next(loader)
  assert reader_threads()
  loader.close()
  loader.close()
  assert not reader_threads()
  with pytest.raises(ValueError, match="closed"):
    next(loader)


def test_forgotten_loader_is_closed():
  loader = make(prefetch=2)
  next(loader)
  del loader
  assert not reader_threads()


def test_exit_without_close_is_quiet():
  code = (
    "import types, numpy as np\n"
    "from memcomp.data import loader, store\n"
    "c = types.SimpleNamespace(packing='joined', sequence_length=4, seed=0,"
    " prefetch=2, validation_share=0.0, task=None, stretch=0,"
    " format='text', chat_template='chatml')\n"
    "s = store.ArrayStore('s', np.zeros(99, np.uint8), [99])\n"
    "kept = loader.make_loader(c, s, batch_size=2, shuffle=True)\n"
    "print(next(kept).tokens.shape)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
  )
  assert (done.returncode, done.stdout, done.stderr) == (0, "(2, 4)\n", "")


@EVERY
def test_batches_share_no_memory(pack):
  """Whatever a consumer writes into one does not show in another."""
  with make(packing=pack, batch_size=1) as loader:
    first, second = take(loader, 2)
  arrays = [*first, *second]
  for a, b in itertools.combinations(arrays, 2):
    assert not np.shares_memory(a, b)
