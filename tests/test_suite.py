"""What the suite does with itself: parts, the limit, the slowest."""

import argparse
import pathlib
import subprocess
import sys

import cpu_seconds
import pytest
import rotation

BUSY = """
import time
import pytest

def work(seconds):
  end = time.process_time() + seconds
  while time.process_time() < end:
    pass

@pytest.fixture
def long():
  work(0.2)

def test_short():
  work(0.01)

def test_long():
  work(0.3)

def test_long_setup(long):
  work(0.1)

@pytest.mark.slow
def test_may_be_long():
  work(0.3)
"""


@pytest.fixture
def run(pytester, monkeypatch):
  """Runs a file of tests under the suite's plugins."""
  monkeypatch.setattr(cpu_seconds, "LIMIT", 0.1)
  monkeypatch.setattr(cpu_seconds, "_WORTH_LISTING", 0.1)
  folder = pathlib.Path(cpu_seconds.__file__).parent
  pytester.makeini(f"[pytest]\nmarkers = slow\npythonpath = '{folder}'")

  def of(source, *options, slowdown=1.0):
    monkeypatch.setattr(cpu_seconds, "slowdown", lambda: slowdown)
    pytester.makeconftest(
      "import cpu_seconds\n"  # in workers, too
      f"cpu_seconds.slowdown = lambda: {slowdown}\n"
      "pytest_plugins = ['rotation', 'cpu_seconds']"
    )
    pytester.makepyfile(source)
    return pytester.runpytest_inprocess(*options)

  return of


# In this process, and from a worker, which reports to it.
@pytest.mark.parametrize("workers", rotation.cases([0, 1], [1]))
def test_a_test_over_the_limit_fails_the_run(run, workers):
  result = run(BUSY, "-n", workers)
  result.assert_outcomes(passed=4)
  assert result.ret == pytest.ExitCode.TESTS_FAILED
  lines = result.stdout.lines
  named = [x.split()[1] for x in lines if "mark it slow" in x]
  assert {x.partition("::")[2] for x in named} == {
    "test_long",
    "test_long_setup",
  }
  first = lines.index(next(x for x in lines if x.startswith("CPU seconds: ")))
  listed = [x.partition("::")[2] for x in lines[first + 1 : first + 4]]
  assert set(listed) == {"test_long", "test_long_setup", "test_may_be_long"}


def test_within_the_limit_a_run_passes(run):
  result = run(BUSY, "-k", "short or may_be", "-n", "0")
  assert result.ret == pytest.ExitCode.OK


def test_other_work_on_the_machine_counts_for_nothing(run):
  assert run(BUSY, "-n", "0", slowdown=2.0).ret == pytest.ExitCode.OK


def test_finished_subprocesses_count():
  before = cpu_seconds.spent()
  work = "import time\nwhile time.process_time() < 0.3: pass"
  subprocess.run([sys.executable, "-c", work], check=True)
  # The system rounds a subprocess's time down to hundredths.
  assert cpu_seconds.spent() - before >= 0.27


def test_every_test_is_in_one_part(run):
  source = """
    import pytest

    @pytest.mark.parametrize("x", range(20))
    def test_one(x): pass

    @pytest.mark.parametrize("x", range(20))
    def test_other(x): pass
  """
  ran = []
  for number in (1, 2, 3):
    result = run(source, "-v", "-n", "0", f"--part={number}/3")
    found = [x.split()[0] for x in result.stdout.lines if x.endswith("%]")]
    names = {x.replace("test_other", "test_one") for x in found}
    assert len(found) == 2 * len(names)  # the same parameters, the same part
    assert 2 <= len(names) <= 12
    ran += found
  assert len(ran) == len(set(ran)) == 40


@pytest.mark.parametrize("text", ["3", "0/3", "4/3", "a/b", "1/"])
def test_parts_are_numbered_from_1(text):
  with pytest.raises(argparse.ArgumentTypeError, match=text):
    rotation.part_of(text)
