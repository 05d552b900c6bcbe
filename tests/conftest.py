"""Settings of every test; made before jax is imported.

Eight fake devices. Tests compile far more than they compute, so XLA leaves its
optimisations out, and workers share what they have compiled. Subprocesses of
tests inherit all of it.
"""

import atexit
import gc
import itertools
import locale
import os
import pathlib
import shutil
import signal
import tempfile

import pytest

pytest_plugins = ["rotation", "cpu_seconds", "pytester"]

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

# Files are UTF-8. Workers and subprocesses inherit this; for a run without
# workers it comes too late: see `pytest_configure`.
UTF8 = locale.getpreferredencoding(False).lower() in ("utf-8", "utf8")
if not UTF8:
  os.environ["PYTHONUTF8"] = "1"

# Run in the background, a shell has Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
  if not (UTF8 or config.getoption("numprocesses", 0)):
    raise pytest.UsageError(
      f"this locale's encoding is {locale.getpreferredencoding(False)}, and the files that"
      " tests read are UTF-8: set PYTHONUTF8=1, or use workers (-n 1)"
    )


def pytest_collection_finish():
  """Spares the collector what imports have made: 4 % of the time."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(100_000, 20, 100)


# A compiled program holds some of the 65,530 memory maps that Linux allows a
# process; beyond them it crashes.
_MAPS = pathlib.Path("/proc/self/maps")
_MANY, _TOO_MANY = 20_000, 45_000
_finished = itertools.count(1)


def pytest_runtest_teardown(item, nextitem):
  """Lets go of compiled programs when they are many.

  After a file, since tests of a file share programs; within one only where it
  has to be.
  """
  last_of_file = nextitem is None or nextitem.path != item.path
  if not (last_of_file or next(_finished) % 25 == 0) or not _MAPS.exists():
    return
  maps = _MAPS.read_bytes().count(b"\n")
  if maps > (_MANY if last_of_file else _TOO_MANY):
    import jax

    jax.clear_caches()


# A worker of these tests holds up to this much memory.
_GIB_PER_WORKER = 4
_MOST_WORKERS = 16


@pytest.hookimpl(optionalhook=True)  # where xdist is missing
def pytest_xdist_auto_num_workers():
  """A worker per core, as far as memory goes: what `-n auto` means."""
  from memcomp import platforms

  memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  fit = memory // (_GIB_PER_WORKER * 2**30)
  return max(1, min(platforms.cores(), fit, _MOST_WORKERS))
