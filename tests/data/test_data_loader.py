"""Batches: their order, their place, their share per process."""

import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from memcomp import config as config_lib
from memcomp import errors
from memcomp.data import loader as loader_lib
from memcomp.data import packing
from memcomp.data import store as store_lib

LENGTH = 8


def make_store(num_documents=200, *, seed=0, first=0, name="made"):
  lengths = np.random.default_rng(seed).integers(1, 25, num_documents)
  tokens = np.arange(first, first + lengths.sum(), dtype=np.uint32)
  return store_lib.ArrayStore(name, tokens, lengths)


def make_mixture():
  parts = [make_store(200), make_store(100, seed=1, first=10_000)]
  return store_lib.Mixture(parts, [0.75, 0.25])


def make(store=None, *, batch_size=8, shuffle=True, local_rows=None, **changes):
  settings = {"sequence_length": LENGTH, "packing": "concat", "prefetch": 0}
  return loader_lib.make_loader(
    config_lib.DataConfig(**settings | changes),
    store or make_store(),
    batch_size=batch_size,
    shuffle=shuffle,
    local_rows=local_rows,
  )


def take(loader, count):
  return [next(loader) for _ in range(count)]


def assert_equal(ours, theirs):
  assert len(ours) == len(theirs)
  for mine, other in zip(ours, theirs, strict=True):
    for a, b in zip(mine, other, strict=True):
      np.testing.assert_array_equal(a, b)


STORES = {"one": make_store, "mixture": make_mixture}
EVERY = pytest.mark.parametrize("pack", packing.PACKINGS)


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


@EVERY
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("store", STORES)
def test_resume_is_exact(pack, prefetch, store):
  settings = {"packing": pack, "prefetch": prefetch}
  with make(STORES[store](), **settings) as whole:
    states, batches = [], []
    for _ in range(25):
      states.append(json.loads(json.dumps(whole.state())))
      batches.append(next(whole))
  for step in (0, 1, 7, 24):
    assert states[step]["step"] == step
    with make(STORES[store](), **settings) as again:
      take(again, 3)
      again.restore(states[step])
      assert again.state() == states[step]
      assert_equal(take(again, 25 - step), batches[step:])
      again.restore(states[1])  # and back, the reader already running
      assert_equal(take(again, 2), batches[1:3])


def test_restore_after_the_end():
  with make(shuffle=False, prefetch=2) as loader:
    state = loader.state()
    batches = list(loader)
    with pytest.raises(StopIteration):
      next(loader)
    loader.restore(state)
    assert_equal(list(loader), batches)


@EVERY
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("store", STORES)
def test_processes_share_the_global_batch(pack, shuffle, store):
  """Rows of 1, 2 and 4 processes, also when the number changes on the way."""
  settings = {"packing": pack, "shuffle": shuffle}
  steps = 5
  with make(STORES[store](), **settings) as alone:
    state, whole = None, []
    for step in range(steps):
      if step == 3:
        state = alone.state()
      whole.append(next(alone))
  for count in (2, 4):
    for start, saved in ((0, None), (3, state)):
      merged = [
        loader_lib.batch_lib.padding(8, LENGTH) for _ in range(steps - start)
      ]
      # Neighbours, or not: what a process holds is up to the mesh.
      shares = np.arange(8).reshape(count, -1)
      if count == 4:
        shares = np.arange(8).reshape(-1, count).T
      for rows in shares:
        with make(
          STORES[store](), local_rows=rows, prefetch=1, **settings
        ) as part:
          assert part.local_batch == 8 // count
          if saved:
            part.restore(saved)
          for batch, result in zip(
            take(part, steps - start), merged, strict=True
          ):
            for ours, all_rows in zip(batch, result, strict=True):
              all_rows[rows] = ours
          assert part.state() == {**(saved or part.state()), "step": steps}
      assert_equal(merged, whole[start:])


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


def test_stretches_go_on_where_they_stopped():
  given = {"packing": "stream", "stretch": 3, "batch_size": 4}
  with make(**given) as loader:
    whole = take(loader, 12)
    place = loader.state()
    following = take(loader, 5)
  with make(**given) as loader:
    loader.restore(place)
    again = take(loader, 5)
  for a, b in zip(following, again, strict=True):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.segment_ids, b.segment_ids)
  rows = [
    (a.segment_ids[i, -1] == b.segment_ids[i, 0])
    for a, b in itertools.pairwise(whole)
    for i in range(4)
  ]
  assert 0 < sum(rows) < len(rows)
  # Not told, the loader names what differs.
  with (
    make(**given | {"stretch": 4}) as loader,
    pytest.raises(errors.UserError, match="stretch was 3"),
  ):
    loader.restore(place)


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


@pytest.mark.parametrize(
  ("key", "arguments"),
  [
    ("batch_size", {"batch_size": 4}),
    ("seed", {"seed": 1}),
    ("packing", {"packing": "joined"}),
    ("sequence_length", {"sequence_length": 7}),
    ("data", {"store": make_store(199)}),
    ("shuffle", {"shuffle": False}),
  ],
)
def test_restore_refuses_other_data(key, arguments):
  with make() as loader:
    next(loader)
    state = loader.state()
  with (
    make(**arguments) as other,
    pytest.raises(errors.UserError, match=f"{key} was"),
  ):
    other.restore(state)


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


def test_start_step():
  with make() as loader:
    batches = take(loader, 5)
  settings = config_lib.DataConfig(sequence_length=LENGTH, packing="concat")
  with loader_lib.make_loader(
    settings, make_store(), batch_size=8, shuffle=True, start_step=3
  ) as later:
    assert later.state()["step"] == 3
    assert_equal(take(later, 2), batches[3:])


@EVERY
def test_batches_share_no_memory(pack):
  """Whatever a consumer writes into one does not show in another."""
  with make(packing=pack, batch_size=1) as loader:
    first, second = take(loader, 2)
  arrays = [*first, *second]
  for a, b in itertools.combinations(arrays, 2):
    assert not np.shares_memory(a, b)
