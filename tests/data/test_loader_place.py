"""A loader's place: kept, gone on from, refused, and shared by processes."""

import itertools
import json

import numpy as np
import pytest
from loader_cases import (
  EVERY,
  LENGTH,
  STORES,
  assert_equal,
  make,
  make_store,
  take,
)

from memcomp import errors
from memcomp.data import loader as loader_lib


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
          if saved:
            part.restore(saved)
          for batch, result in zip(
            take(part, steps - start), merged, strict=True
          ):
            for ours, all_rows in zip(batch, result, strict=True):
              all_rows[rows] = ours
          assert part.state() == {**(saved or part.state()), "step": steps}
      assert_equal(merged, whole[start:])


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
