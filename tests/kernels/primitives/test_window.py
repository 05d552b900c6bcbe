"""The window: rows by hand, and calls of many tokens against pushes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation

from memcomp_kernels import contract, window
from memcomp_kernels.testing import gradients, subjects

HEADS = 2
held = jax.jit(window.held, static_argnames=("size", "sink_tokens"))


pytestmark = pytest.mark.usefixtures("float64")


def test_rows_by_hand():
  """Two sinks and a ring of three: tokens 0 to 8 leave 0 1 | 8 6 7."""
  rows, position = np.zeros((1, 1, 5)), np.zeros(1, np.int32)
  push, gone = jax.jit(functools.partial(window.push, sink_tokens=2)), []
  for p in range(9):
    rows, evicted, evicts = push(rows, np.full((1, 1), 10.0 + p), position)
    position += 1
    if evicts[0]:
      gone.append(float(evicted[0, 0]))
    expected = np.array(held(position, size=5, sink_tokens=2))[0]
    live = expected >= 0
    np.testing.assert_array_equal(live, np.arange(5) < p + 1)
    np.testing.assert_array_equal(rows[0, 0][live] - 10, expected[live])
  np.testing.assert_array_equal(rows[0, 0], [10, 11, 18, 16, 17])
  assert gone == [12, 13, 14, 15]  # a token leaves three tokens later


def segment_rows(time=20):
  rows = np.zeros((6, time), np.int32)
  rows[0] = 1  # goes on
  rows[1, 2:9], rows[1, 13:] = 1, 1  # with padding inside
  rows[2, :3], rows[2, 3:4], rows[2, 4:15] = 1, 4, 2
  rows[3] = np.arange(time) % 2 + 1  # every token anew
  rows[4, 1:], rows[4, 5:8] = 7, 0  # not the state's segment
  return rows  # the last is padding


def random_rows(rng, *shape):
  return {
    "key": rng.standard_normal((*shape, 3)),
    "route": rng.standard_normal(shape),
  }


def random_state(rng, size, positions):
  positions = np.array(positions, np.int32)
  rows = random_rows(rng, len(positions), HEADS, size)
  empty = np.array(held(positions, size=size)) < 0
  for x in rows.values():
    np.moveaxis(x, 1, 0)[:, empty] = 0
  return rows, positions


def setting(size, positions, reset_positions):
  rng, ids = np.random.default_rng(0), segment_rows()
  state = random_state(rng, size, positions)
  reset = random_state(rng, size, reset_positions)
  return ids, state, reset, random_rows(rng, *ids.shape, HEADS)


def by_push(rows, reset_rows, tokens, ids, positions, reset_positions, sinks):
  """Rows, evicted tokens and whether there were any: token by token."""

  def step(carry, x):
    (rows, position, last), (token, segment) = carry, x
    starts = (segment != 0) & (last != 0) & (last != segment)
    valid = segment != 0
    rows = contract.batched_where(starts, reset_rows, rows)
    position = jnp.where(starts, reset_positions, position)
    new, evicted, evicts = window.push(rows, token, position, sink_tokens=sinks)
    evicts &= valid
    evicted = contract.batched_where(
      evicts, evicted, jax.tree.map(jnp.zeros_like, evicted)
    )
    rows = contract.batched_where(valid, new, rows)
    last = jnp.where(valid, segment, last)
    return (rows, position + valid, last), (evicted, evicts)

  by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, ids))
  last = jnp.ones_like(positions)
  (rows, position, last), out = jax.lax.scan(
    step, (rows, positions, last), by_time
  )
  evicted, evicts = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)
  return rows, evicted, evicts, position, last


def by_placement(
  rows, reset_rows, tokens, ids, positions, reset_positions, sinks
):
  size = rows["route"].shape[2]
  where = window.placement(
    ids,
    jnp.ones_like(positions),
    positions,
    reset_positions,
    time=ids.shape[1],
    size=size,
    sink_tokens=sinks,
  )
  joined = window.join(where, rows, tokens)
  evicted, evicts = window.evicted(where, joined, reset_rows)
  return (
    window.advance(where, rows, reset_rows, joined),
    window.restore(where, evicted),
    window.restore(where, evicts),
    where.next_position,
    where.segment_id,
  )


EMPTY, PREFIX = [0] * 6, [4, 9, 2, 1, 30, 0]
RESETS = pytest.mark.parametrize(
  "reset_positions",
  rotation.cases([EMPTY, PREFIX], [PREFIX]),
  ids=["empty", "prefix"],
)
SIZES = pytest.mark.parametrize(
  ("size", "sinks"), rotation.cases([(4, 0), (5, 2), (40, 3)], [(5, 2)])
)


@pytest.mark.slow
@RESETS
@SIZES
def test_a_call_is_its_pushes(size, sinks, reset_positions):
  ids, state, reset, tokens = setting(
    size, [0, 1, 3, 6, 13, 5], reset_positions
  )
  floats = state[0], reset[0], tokens

  def result(function):
    def run(*floats):
      return function(*floats, ids, state[1], reset[1], sinks)

    return gradients.value_and_gradients(run, floats)

  subjects.assert_agree(result(by_placement), result(by_push), "window")


@RESETS
@SIZES
def test_what_a_token_sees(size, sinks, reset_positions):
  """Band, sinks before it and reset rows are what the pushed window holds."""
  ids, state, reset, tokens = setting(
    size, [0, 1, 3, 6, 13, 5], reset_positions
  )
  batch, time = ids.shape

  @jax.jit
  def seen_by_tokens(ids, state, reset, tokens):
    where = window.placement(
      ids,
      jnp.ones_like(state[1]),
      *(state[1], reset[1]),
      time=time,
      size=size,
      sink_tokens=sinks,
    )
    joined = window.join(where, state[0], tokens)["route"]
    places = jnp.arange(where.prior, where.prior + time) - where.ring + 1
    sinks_of = window.sinks(where, state[0]["route"], joined, places)
    return where, joined, sinks_of, places

  found = seen_by_tokens(ids, state, reset, tokens)
  where, joined, (found, exists, runs), places = jax.device_get(found)
  reset_held = np.array(held(reset[1], size=size, sink_tokens=sinks))
  ids, tokens = jax.device_get((ids, tokens["route"]))

  def contents(state, b):
    """Position to token of a window."""
    live = np.array(held(state[1], size=size, sink_tokens=sinks))[b]
    rows = np.array(state[0]["route"])[b, 0]
    return {int(p): x for p, x in zip(live, rows, strict=True) if p >= 0}

  for b in range(batch):
    inside, position, last, at = contents(state, b), int(state[1][b]), 1, None
    for t in range(time):
      if ids[b, t] == 0:
        continue
      at = where.prior if at is None else at + 1
      if ids[b, t] != last:
        inside, position = contents(reset, b), int(reset[1][b])
        last = ids[b, t]
      inside[position] = tokens[b, t, 0]
      if position - where.ring >= sinks:
        del inside[position - where.ring]
      assert where.position[b, at] == position

      first, rank, run = (
        places[at - where.prior],
        at - where.prior,
        where.run[b, at],
      )
      line = np.arange(max(first, 0), at + 1)
      seen = list(joined[b, line[where.run[b, line] == run], 0])
      if runs[b, rank] == run:
        seen += list(found[b, rank, :, 0][exists[b, rank]])
      if run > 0:
        before = reset_held[b]
        near = (before > position - where.ring) | (before < sinks)
        rows = np.array(reset[0]["route"])[b, 0]
        seen += list(rows[near & (before >= 0)])
      np.testing.assert_array_equal(
        np.sort(seen), np.sort(list(inside.values()))
      )
      position += 1


@pytest.mark.parametrize("max_position", rotation.cases([0, 2, 9], [2]))
def test_a_bound_of_what_was_seen_keeps_fewer_places(max_position):
  ids, state, reset, tokens = setting(6, [min(max_position, 2)] * 6, [0] * 6)

  def run(max_position, ids):
    where = window.placement(
      ids,
      jnp.ones_like(state[1]),
      *(state[1], reset[1]),
      time=20,
      size=6,
      sink_tokens=1,
      max_position=max_position,
    )
    assert where.prior == (5 if max_position is None else min(max_position, 5))
    joined = window.join(where, state[0], tokens)
    return window.evicted(where, joined, reset[0]), window.advance(
      where, state[0], reset[0], joined
    )

  run = jax.jit(run, static_argnums=0)
  for packing in (ids, None):
    expected = run(None, packing)
    jax.tree.map(
      np.testing.assert_array_equal, run(max_position, packing), expected
    )


def test_without_segment_ids_all_goes_on():
  _, state, reset, tokens = setting(5, [0, 1, 3, 6, 13, 5], [0] * 6)
  ids = np.ones((6, 20), np.int32)

  @jax.jit
  def run(ids):
    where = window.placement(
      ids,
      jnp.ones_like(state[1]),
      *(state[1], reset[1]),
      time=20,
      size=5,
      sink_tokens=2,
    )
    joined = window.join(where, state[0], tokens)
    rows = window.advance(where, state[0], reset[0], joined)
    return joined, window.evicted(where, joined, reset[0]), rows, where.run

  jax.tree.map(np.testing.assert_array_equal, run(None), run(ids))


def test_padding_inside_a_segment_is_no_distance(monkeypatch):
  """A check by pushes bites: counting padding as tokens turns it red."""
  right = contract.segment_starts

  def wrong(ids, before):
    return right(jnp.where(ids == 0, 9, ids), before)

  monkeypatch.setattr(contract, "segment_starts", wrong)
  with pytest.raises(AssertionError, match="window"):
    test_a_call_is_its_pushes(5, 2, [0] * 6)
