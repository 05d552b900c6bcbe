"""Settings of every test; made before jax is imported.

Eight fake devices. Tests compile far more than they compute, so XLA leaves its
optimisations out, and workers share what they have compiled. Subprocesses of
tests inherit all of it.
"""

import atexit
import itertools
import os
import pathlib
import shutil
import signal
import tempfile

import pytest

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  # In the process that starts the workers; they inherit the variable.
  folder = tempfile.mkdtemp(prefix="memcomp-programs-")
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
devices = "--xla_force_host_platform_device_count=8"
if devices not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
  )

# Run in the background, a shell has Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)


# A compiled program holds some of the 65,530 memory maps that Linux allows a
# process; beyond them it crashes.
_MAPS = pathlib.Path("/proc/self/maps")
_MANY = 20_000
_finished = itertools.count(1)


def pytest_runtest_teardown():
  """Lets go of compiled programs when they are many."""
  if next(_finished) % 25 or not _MAPS.exists():
    return
  if _MAPS.read_bytes().count(b"\n") > _MANY:
    import jax

    jax.clear_caches()


_TESTS = pathlib.Path(__file__).parent
_LEFT_OUT = {
  f"{_TESTS.name}/{line}"
  for line in (_TESTS / "slow.txt").read_text().splitlines()
  if line and not line.startswith("#")
}


_UNKNOWN = pytest.StashKey[set[str]]()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
  """Marks the tests that slow.txt names."""
  named = [item for item in items if item.nodeid in _LEFT_OUT]
  for item in named:
    item.add_marker(pytest.mark.slow)
  is_whole = config.args == config.getini("testpaths")
  found = {item.nodeid for item in named}
  config.stash[_UNKNOWN] = _LEFT_OUT - found if is_whole else set()


@pytest.fixture
def unknown_slow_tests(pytestconfig):
  """Names in slow.txt of no test; none where only some tests are collected."""
  return pytestconfig.stash[_UNKNOWN]
