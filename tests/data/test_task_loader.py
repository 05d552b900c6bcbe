"""Rows of a task through the loader: order, place, processes, settings."""

import itertools
import json

import numpy as np
import pytest
from loader_cases import assert_equal, take

from memcomp import config as config_lib
from memcomp import errors
from memcomp.data import loader, sources
from memcomp.data.synthetic import mqar_task, recall

TASKS = {
  "recall": recall.RecallConfig(gap=3, episodes=2),
  "mqar": mqar_task.MqarConfig(
    vocab_size=64, train="16:2:7;24:4:12", test="16:2:4;48:8:3", mode="fast"
  ),
}
every = pytest.mark.parametrize("name", list(TASKS))


def settings(name, **changes):
  fields = {
    "task": TASKS[name],
    "tokenizer": "none",
    "sequence_length": 25,
    "seed": 3,
  }
  return config_lib.DataConfig(**fields | changes)


def make(name, *, split="train", shuffle=True, batch_size=4, **changes):
  local_rows = changes.pop("local_rows", None)
  config = settings(name, **changes)
  return loader.make_loader(
    config,
    sources.open_split(config, split),
    batch_size=batch_size,
    shuffle=shuffle,
    local_rows=local_rows,
  )


@every
@pytest.mark.parametrize("prefetch", [0, 2])
def test_going_on_is_exact(name, prefetch):
  with make(name, prefetch=prefetch) as whole:
    states, batches = [], []
    for _ in range(12):
      states.append(json.loads(json.dumps(whole.state())))
      batches.append(next(whole))
  for step in (0, 1, 5, 11):
    with make(name, prefetch=prefetch) as again:
      take(again, 2)
      again.restore(states[step])
      assert_equal(take(again, 12 - step), batches[step:])
  assert {len(b.tokens) for b in batches} == {4}


@every
def test_processes_share_the_global_batch(name):
  with make(name) as alone:
    state, whole = None, []
    for step in range(6):
      state = alone.state() if step == 2 else state
      whole.append(next(alone))
  for rows in (np.arange(2), np.array([1, 3])):
    with make(name, local_rows=rows, prefetch=0) as part:
      part.restore(state)
      for batch, all_rows in zip(take(part, 4), whole[2:], strict=True):
        np.testing.assert_array_equal(batch.tokens, all_rows.tokens[rows])
        np.testing.assert_array_equal(batch.targets, all_rows.targets[rows])


def test_mqar_goes_through_its_segments_each_epoch():
  with make("mqar") as iterator:
    lengths = [batch.tokens.shape[1] for batch in take(iterator, 10)]
    assert iterator.rows_per_epoch == 8 + 12
  assert lengths == [16, 16, 24, 24, 24] * 2
  with make("mqar", split="validation", shuffle=False) as iterator:
    batches = itertools.islice(iterator, 9)
    assert [batch.tokens.shape for batch in batches] == [(4, 16), (4, 48)]


def test_validation_of_recall_is_other_rows_the_same_each_time():
  with (
    make("recall") as train,
    make("recall", split="validation", shuffle=False) as held_out,
    make("recall", split="validation", shuffle=False) as again,
  ):
    seen = {row.tobytes() for b in take(train, 50) for row in b.tokens}
    batches = take(held_out, 5)
    assert_equal(batches, take(again, 5))
  assert not seen & {row.tobytes() for b in batches for row in b.tokens}


@pytest.mark.parametrize(
  ("key", "changes"),
  [
    ("data", {"task": recall.RecallConfig(gap=3, episodes=1)}),
    ("data", {"sequence_length": 26}),
    ("data", {"seed": 4}),
    ("batch_size", {"batch_size": 2}),
  ],
)
def test_another_task_is_not_gone_on_with(key, changes):
  with make("recall") as iterator:
    next(iterator)
    state = iterator.state()
  with (
    make("recall", **changes) as other,
    pytest.raises(errors.UserError, match=f"{key} was"),
  ):
    other.restore(state)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tokenizer": "bytes"}, r"data.tokenizer = 'bytes'.*set .*to none"),
    ({"packing": "stream"}, r"data.packing = 'stream'.*set .*to joined"),
    ({"seed": -1}, r"data\.seed=-1: give a whole number"),
    ({"sequence_length": 24}, r"data.sequence_length = 24.*take 25 tokens"),
    ({"task": recall.RecallConfig(gap=-1)}, r"data.task: gap=-1"),
  ],
)
def test_impossible_settings(changes, message):
  with pytest.raises(errors.UserError, match=message) as caught:
    make("recall", **changes)
  assert "\n" not in str(caught.value)


def test_a_task_has_no_text():
  config = settings("recall")
  with pytest.raises(errors.UserError, match=r"rows of task recall.*--task="):
    sources.open_text(config, "train")
  with pytest.raises(errors.UserError, match=r"stand for no text"):
    sources.open_split(
      config_lib.DataConfig(
        tokenizer="none", source=__file__, validation_share=0.0
      ),
      "train",
    )
