"""Interleaving a kernel's pieces: order, and who may read when."""

import itertools

import pytest

from memcomp_kernels.pallas_tpu import schedule


def record(chunks, units, group, skew, before=2, after=1):
  """Runs pieces of some stages; returns (chunk, unit, event) in order."""
  events = []

  def piece(chunk, unit):
    for stage in range(before):
      events.append((chunk, unit, stage))
      yield None
    yield schedule.READS
    events.append((chunk, unit, "reads"))
    for _ in range(3):  # the next chunk comes sooner than this one writes
      yield None
    events.append((chunk, unit, "writes"))
    yield schedule.WROTE
    for stage in range(after):
      events.append((chunk, unit, before + stage))
      yield None

  schedule.run(piece, chunks=chunks, units=units, group=group, skew=skew)
  return events


SIZES = [(1, 1), (2, 1), (3, 2), (6, 3), (4, 1)]


@pytest.mark.parametrize(("group", "skew"), SIZES)
@pytest.mark.parametrize("chunks", [range(3), range(2, -1, -1)])
def test_states_pass_from_chunk_to_chunk(chunks, group, skew):
  events = record(chunks, 5, group, skew)
  for unit in range(5):
    order = [
      (chunk, what)
      for chunk, at, what in events
      if at == unit and what in ("reads", "writes")
    ]
    assert order == list(itertools.product(chunks, ("reads", "writes")))
  assert len(events) == len(set(events)) == 3 * 5 * 5


def test_groups_go_in_lock_step_and_others_behind():
  events = record(range(1), 4, 2, 2)
  at = {event: i for i, event in enumerate(events)}
  # Both of a group do a stage before either does the next.
  assert at[0, 1, 0] < at[0, 0, 1] and at[0, 0, 1] < at[0, 1, "reads"]
  # The second group begins two stages later, not when the first has ended.
  assert at[0, 0, 1] < at[0, 2, 0] < at[0, 0, "writes"]


def test_a_piece_works_ahead_up_to_its_read():
  events = record(range(2), 1, 1, 1)
  at = {event: i for i, event in enumerate(events)}
  assert at[1, 0, 1] < at[0, 0, "writes"] < at[1, 0, "reads"]


def test_a_piece_must_write():
  def piece(chunk, unit):
    del chunk, unit
    yield schedule.READS

  with pytest.raises(ValueError, match="without writing"):
    schedule.run(piece, chunks=range(1), units=1, group=1, skew=1)


def test_pieces_meet_before_any_goes_on():
  events = []

  def piece(unit):
    for stage in range(1 + unit):  # not all take as long
      events.append((unit, stage))
      yield None
    yield schedule.MEETS
    events.append((unit, "after"))

  pieces = [piece(unit) for unit in range(3)]
  schedule.meet(pieces, group=2, skew=2)
  before = [(unit, i) for unit in range(3) for i in range(1 + unit)]
  assert sorted(events) == before
  assert events[:2] == [(0, 0), (1, 0)]  # in lock step
  assert events.index((1, 1)) < events.index((2, 0))  # the second group later
  schedule.meet(pieces, group=2, skew=2)
  assert events[len(before) :] == [(unit, "after") for unit in range(3)]
