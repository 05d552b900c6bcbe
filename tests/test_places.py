"""The suite where nobody has developed it: locales, paths, permissions."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Files, subprocesses, locks, a compiled program, text that is not ASCII.
SELECTION = (
  "tests/data/test_data_sources.py",
  "tests/evaluation/test_slices.py",
  "tests/examples/test_quoted.py",
  "tests/test_documented_commands.py",
  "tests/test_lock.py",
  "tests/test_package.py::test_imports_with_no_clone",
  "tests/training/test_workdir.py",
)
# What is left of a locale when neither Python nor the system makes it UTF-8.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

pytestmark = pytest.mark.slow


@pytest.fixture
def checkout(tmp_path):
  """A copy of this clone, with a space in its path."""
  folder = tmp_path / "my clone"
  left_out = shutil.ignore_patterns(
    *(".*_cache", "__pycache__", "*.egg-info", "runs", "venv", ".venv", ".git")
  )
  shutil.copytree(ROOT, folder, ignore=left_out)
  yield folder
  subprocess.run(["chmod", "-R", "u+w", folder], check=True)


def run(checkout, *options, before=(), ignored=None, **variables):
  """pytest of `options`: exit code and what it printed."""
  paths = os.pathsep.join([str(checkout), str(checkout / "kernels")])
  # The process inherits what is ignored here.
  before_it = ignored and signal.signal(ignored, signal.SIG_IGN)
  try:
    done = subprocess.run(
      [*before, sys.executable, "-m", "pytest", *options],
      cwd=checkout,
      env=os.environ | {"PYTHONPATH": paths} | variables,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  finally:
    if ignored:
      signal.signal(ignored, before_it)
  return done.returncode, done.stdout.decode(errors="replace")


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, ASCII], ids=["C", "ASCII"])
def test_locales(checkout, locale):
  code, out = run(checkout, "-n", "1", *SELECTION, **locale)
  assert code == 0, out


def test_a_locale_without_workers_says_what_it_needs(checkout):
  code, out = run(checkout, "-n", "0", "tests/test_lock.py", **ASCII)
  assert code == pytest.ExitCode.USAGE_ERROR
  assert out.count("set PYTHONUTF8=1, or use workers (-n 1)") == 1


def test_in_the_background(checkout):
  """As a shell's `&` starts it: Ctrl-C is ignored."""
  options = "tests/training/test_training_resume.py", *SELECTION
  code, out = run(checkout, "-n", "1", *options, ignored=signal.SIGINT)
  assert code == 0, out


def test_no_permission_to_write(checkout):
  before = ()
  if os.geteuid() == 0:  # whom permissions do not stop
    before = ("setpriv", "--bounding-set=-dac_override,-fowner")
    if shutil.which("setpriv") is None:
      pytest.skip("needs setpriv, or another user than root")
  subprocess.run(["chmod", "-R", "a-w", checkout], check=True)
  written = subprocess.run([*before, "touch", checkout / "file"])
  assert written.returncode != 0
  code, out = run(checkout, "-n", "1", *SELECTION, before=before)
  assert code == 0, out
