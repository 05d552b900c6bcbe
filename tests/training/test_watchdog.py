import itertools
import threading
import time

import jax
import jax.numpy as jnp
import pytest
import training_cases

from memcomp.training import feed, run, validation, watchdog


@pytest.fixture
def ended(monkeypatch):
  """Set in place of the end of the process."""
  event = threading.Event()

  def end(code):
    event.code = code
    event.set()

  monkeypatch.setattr(watchdog.os, "_exit", end)
  return event


def test_without_a_beat_for_long_it_ends_the_process(ended, tmp_path, capfd):
  file = tmp_path / "stacks.txt"
  with watchdog.Watchdog(0.2, file) as watch:
    watch.beat(7)
    assert ended.wait(20) and ended.code == 45
  err = capfd.readouterr().err
  for stacks in (file.read_text(), err):
    assert "test_watchdog.py" in stacks  # Where the main thread waits.
  assert "error: nothing ended for 0.2 s after step 7" in err.splitlines()[-1]


def test_the_first_beat_takes_its_time(ended, tmp_path):
  with watchdog.Watchdog(0.2, tmp_path / "stacks.txt"):
    assert not ended.wait(1)


def test_a_rest_takes_its_time(ended, tmp_path):
  with watchdog.Watchdog(0.2, tmp_path / "stacks.txt") as watch:
    watch.beat(1)
    watch.rest()
    assert not ended.wait(1)
    watch.beat(2)
    assert ended.wait(20)


@pytest.mark.usefixtures("leaky_model")
def test_the_first_validation_takes_its_time(
  ended, tmp_path, text, monkeypatch
):
  """It compiles."""
  make = validation.make

  def slow_at_first(*arguments):
    validate, seconds = make(*arguments), [7.0]

    def call(params):
      time.sleep(seconds.pop() if seconds else 0)
      return validate(params)

    return call

  monkeypatch.setattr(validation, "make", slow_at_first)
  config = training_cases.tiny(
    text, steps=6, evaluate_every=4, watchdog_seconds=4.0
  )
  assert run.run(config, tmp_path / "run") == 0
  assert not ended.is_set()


@pytest.mark.usefixtures("leaky_model")
def test_the_first_step_of_another_row_length_takes_its_time(
  tmp_path, text, monkeypatch
):
  fetch, fetched, rested = feed.Feed.__next__, itertools.count(1), []

  def longer_at_last(self):
    batch, place = fetch(self)
    if next(fetched) > 3:
      batch = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, 4)), mode="edge"), batch
      )
    return batch, place

  monkeypatch.setattr(feed.Feed, "__next__", longer_at_last)
  monkeypatch.setattr(watchdog.Watchdog, "rest", lambda _: rested.append(1))
  assert run.run(training_cases.tiny(text, steps=6), tmp_path / "run") == 0
  assert len(rested) == 2


def test_beats_keep_it_quiet(ended, tmp_path):
  with watchdog.Watchdog(2.0, tmp_path / "stacks.txt") as watch:
    for step in range(30):
      watch.beat(step)
      time.sleep(0.1)
  assert not ended.is_set() and not list(tmp_path.iterdir())


def test_nothing_is_watched_with_zero(ended, tmp_path):
  before = threading.active_count()
  with watchdog.Watchdog(0.0, tmp_path / "stacks.txt") as watch:
    watch.beat(1)
    assert threading.active_count() == before
  assert not ended.is_set()
