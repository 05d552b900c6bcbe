"""CPU seconds of every test: a table of the slowest, and a limit.

What counts is the time of setup and call, of all threads and of subprocesses
that ended. Other work on the machine lengthens it: the second thread of a core
takes up to half of its speed, and many processes empty its caches. So the time
is divided by `slowdown`.
"""

import os
import statistics
import time

import pytest

LIMIT = 20.0
"""Seconds a test may take that is in everybody's run, on an idle machine."""

ROOM = 3.0
"""How many times longer it may take elsewhere before it is an error: what
compiling loses to the other worker is not in `slowdown`. One test of 26 seconds
took 59 on another machine."""

LEFT_OUT = {"slow", "aot", "aot_gpu", "harness"}
"""Marks of tests that are not: they may take longer."""

_IDLE = 0.005
"""Seconds that `_work` takes on a machine that does nothing else."""

_LISTED, _WORTH_LISTING = 10, 5.0
_NAME = "cpu_seconds"


def _work() -> float:
  start, total = time.thread_time(), 0
  for i in range(50_000):
    total = (31 * total + i) & 0xFFFF
  return time.thread_time() - start


def slowdown() -> float:
  """How many times longer than on an idle machine things take now.

  By a fixed piece of work, which feels the other thread of its core, and by the
  processes that wait for a core, of which this run has up to two for each.
  """
  slower = statistics.median(_work() for _ in range(3)) / _IDLE
  waiting = os.getloadavg()[0] / (2 * (os.cpu_count() or 1))
  return max(1.0, slower) * max(1.0, waiting)


def spent() -> float:
  """CPU seconds of this process and of its subprocesses that ended."""
  times = os.times()
  children = times.children_user + times.children_system
  return time.process_time() + children


class Clock:
  """Notes the CPU seconds of each phase of a test in its report."""

  def __init__(self):
    self.slowdown = slowdown()
    self.sampled = self.last = spent()

  def pytest_runtest_logstart(self):
    self.last = spent()

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self, item):
    report = yield
    now = spent()
    seconds, self.last = now - self.last, now
    before = self.slowdown
    if now - self.sampled > _WORTH_LISTING:
      self.slowdown = slowdown()
      self.last = self.sampled = spent()
    if report.when != "teardown":
      # Both are samples: the larger counts, so that no test fails by chance.
      seconds /= max(before, self.slowdown)
      report.user_properties.append((_NAME, seconds))
    return report


class Table:
  """Collects what clocks note, in the process that prints."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self.may_be_long: set[str] = set()

  def pytest_runtest_logreport(self, report):
    for name, seconds in report.user_properties:
      if name == _NAME:
        total = self.seconds.get(report.nodeid, 0.0) + seconds
        self.seconds[report.nodeid] = total
    if LEFT_OUT & set(report.keywords):
      self.may_be_long.add(report.nodeid)

  def over(self) -> list[str]:
    return [
      test
      for test, seconds in self.seconds.items()
      if seconds > ROOM * LIMIT and test not in self.may_be_long
    ]

  def pytest_sessionfinish(self, session):
    if self.over() and session.exitstatus == pytest.ExitCode.OK:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter):
    write = terminalreporter.write_line
    slowest = sorted(self.seconds.items(), key=lambda x: -x[1])[:_LISTED]
    slowest = [x for x in slowest if x[1] > _WORTH_LISTING]
    if slowest:
      write(f"CPU seconds: {sum(self.seconds.values()):.0f}; the slowest tests")
    for test, seconds in slowest:
      write(f"{seconds:8.1f}  {test}")
    for test in self.over():
      write(
        f"ERROR {test} takes {self.seconds[test]:.0f} CPU seconds: mark it"
        f" slow, or make it take under {LIMIT:.0f}"
      )


def pytest_configure(config):
  if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
    config.pluginmanager.register(Clock(), "cpu-seconds-clock")
  if not hasattr(config, "workerinput"):
    config.pluginmanager.register(Table(), "cpu-seconds-table")
