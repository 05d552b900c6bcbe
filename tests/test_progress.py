"""Progress of long work: one line on a terminal, lines from time to time else."""

import sys
import time

import pytest

from memcomp import progress


@pytest.fixture
def clock(monkeypatch):
  """Seconds that pass only where a test says so."""
  now = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  return now


def work(clock, units: int, seconds: float) -> None:
  """Does units of work that take so many seconds each."""
  shown = progress.Progress("reading, tokens", units)
  for _ in range(units):
    clock[0] += seconds
    shown.advance()


@pytest.mark.parametrize("terminal", [False, True])
def test_short_work_prints_nothing(clock, terminal, capsys, monkeypatch):
  monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
  work(clock, 100, 0.009)
  assert capsys.readouterr().err == ""


def test_lines_from_time_to_time(clock, capsys):
  work(clock, 100, 1.0)
  lines = capsys.readouterr().err.splitlines()
  assert lines[0] == "reading, tokens: 5 of 100, 95 s left"
  assert lines[1] == "reading, tokens: 15 of 100, 85 s left"
  assert len(lines) == 10


def test_one_line_on_a_terminal(clock, capsys, monkeypatch):
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
  work(clock, 4, 1.0)
  # The first unit compiles; the last one leaves nothing on the terminal.
  assert capsys.readouterr().err == (
    "\rreading, tokens: 2 of 4, 2 s left\033[K"
    "\rreading, tokens: 3 of 4, 1 s left\033[K"
    "\r\033[K"
  )
