"""What the machine refuses is one line with place, cause and fix."""

import errno
import io
import os
import re
import signal
import subprocess
import sys

import pytest

from memcomp import cli, errors, limits, paths, streams


@pytest.mark.parametrize("number", errno.errorcode, ids=errno.errorcode.get)
def test_every_error_of_the_system_is_a_line(number):
  error = OSError(number, os.strerror(number), "a/place")
  line = errors.explain(error)
  assert line.startswith(f"a/place: {os.strerror(number)}; ")
  assert not line.endswith("; ")
  assert errors.explain(RuntimeError("later")) is None


def raised(function):
  try:
    function()
  except Exception as error:
    return error


def caused():
  try:
    raise FileNotFoundError(errno.ENOENT, "No such file", "x")
  except OSError as error:
    raise RuntimeError("of a library") from error


def while_handled():
  try:
    raise FileNotFoundError(errno.ENOENT, "No such file", "x")
  except OSError:
    {}["a bug"]


def full_while_handled():
  try:
    raise OSError(errno.ENOSPC, "No space", "x")
  except OSError:
    raise ValueError("of a library")  # noqa: B904


@pytest.mark.parametrize(
  ("error", "line"),
  [
    (OSError("no connection\nat all"), "no connection; check the path"),
    (raised(caused), "No such file; check the path"),
    (raised(while_handled), None),
    (raised(full_while_handled), "No space left on device; free some space"),
    # As libraries in C++ have it.
    (ValueError("[OS error 13: EACCES Permission denied] x"), "Permission"),
    (RuntimeError("open: Too many open files; a.bin"), "ulimit -n"),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"), "not enough"),
    (
      ValueError("RESOURCE_EXHAUSTED: writing; No space left on device"),
      "No space left on device; free some space",
    ),
    (MemoryError(), "not enough memory (MemoryError); use smaller"),
    (errors.UserError("one\n  line"), "one line"),
    (KeyError("x"), None),
    (OSError(2, "No such", b"\xff.txt"), "\udcff.txt: No such; check"),
  ],
)
def test_explained(error, line):
  found = errors.explain(error)
  assert found is None if line is None else line in found
  assert "\n" not in (found or "")


def fails(error):
  def program():
    raise error

  return program


def test_a_guarded_program(capsys):
  assert cli.guard(lambda: None) == 0
  assert cli.guard(lambda: 43) == 43
  assert cli.guard(fails(errors.UserError("x; y"))) == errors.EXIT_BAD_INPUT
  assert cli.guard(fails(MemoryError()), "prepare: ") == errors.EXIT_BAD_INPUT
  assert cli.guard(fails(KeyboardInterrupt())) == cli.EXIT_INTERRUPTED
  out, err = capsys.readouterr()
  lines = err.splitlines()
  assert out == "" and lines[0] == "error: x; y"
  assert lines[1].startswith("prepare: not enough memory")
  with pytest.raises(KeyError):  # a bug keeps its traceback
    cli.guard(fails(KeyError("x")))


LOST = """
import os, signal, sys, time
from memcomp import cli, errors
class Ends:
  def __del__(self):
    os.kill(os.getpid(), int(sys.argv[1]))
    for _ in range(9): pass
def program():
  Ends()
  time.sleep(30)
sys.exit(cli.guard(program, interrupted=errors.EXIT_RESUMABLE))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_an_object_ends(number):
  """Python drops the exception that its handler raises there."""
  done = subprocess.run(
    [sys.executable, "-c", LOST, str(int(number))],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == errors.EXIT_RESUMABLE
  assert done.stderr == "\ninterrupted; the same command goes on\n"


AT_THE_END = """
import sys
from memcomp import cli
class Ends:
  def __del__(self):
    raise ValueError("the cause")
kept = Ends()
sys.exit(cli.guard(lambda: 0))
"""


def test_an_error_while_python_ends_is_shown():
  done = subprocess.run(
    [sys.executable, "-c", AT_THE_END],
    capture_output=True,
    text=True,
    check=False,
  )
  assert "ValueError: the cause" in done.stderr
  assert "NoneType" not in done.stderr


PROGRAM = """
import sys
from memcomp import cli, errors
def program():
  print("\\u2192 \\udcff")
  print("\\u00e9", file=sys.stderr)
  print(ascii(sys.stdin.read()))
  raise errors.UserError("\\u2190; \\udcfe")
sys.exit(cli.guard(program))
"""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1", "utf-16"])
def test_any_encoding_takes_all_that_is_printed(encoding):
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    env=os.environ | {"PYTHONIOENCODING": encoding},
    input=b""
    if encoding == "utf-16"
    else "é\udcff".encode(
      "latin-1" if encoding == "latin-1" else "utf-8", "surrogateescape"
    ),
    capture_output=True,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  out, err = done.stdout.decode(encoding), done.stderr.decode(encoding)
  assert "\\udcff" in out and "error: " in err and "\\udcfe" in err
  assert "Traceback" not in err
  if encoding == "utf-8":
    assert out.splitlines() == ["→ \\udcff", r"'\xe9\udcff'"]


@pytest.mark.parametrize("closed", ["0<&-", ">&-", "2>&-", ">/dev/full"])
def test_closed_and_full_streams(closed):
  command = f"\"{sys.executable}\" -c '{PROGRAM}' {closed}"
  done = subprocess.run(
    ["bash", "-c", command],
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_streams_that_are_no_files(monkeypatch):
  monkeypatch.setattr(sys, "stdout", io.StringIO())
  streams.prepare()
  print("\udcff")


def test_home_folders(monkeypatch, tmp_path):
  monkeypatch.setenv("HOME", str(tmp_path))
  assert paths.expand("~/a") == f"{tmp_path}/a"
  assert paths.expand("~") == str(tmp_path)
  for path in ("", "a/~", "./~", "/a", "gs://bucket/a", "b~"):
    assert paths.expand(path) == path
  with pytest.raises(errors.UserError, match="~nobody-of-this-name/a: no home"):
    paths.expand("~nobody-of-this-name/a")
  with pytest.raises(errors.UserError, match="null byte"):
    paths.expand("a\0b")
  # As in a container, whose user may be any number.
  monkeypatch.delenv("HOME")
  monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
  with pytest.raises(errors.UserError, match="no home"):
    paths.expand("~/a")


def test_ranges():
  limits.check("--n", 1)
  limits.check("--n", 2**31 - 1)
  limits.check_seed("--seed", 0)
  limits.check_seed("--seed", 2**32 - 1)
  for name, call in {
    "--n=0: give 1 or more": lambda: limits.check("--n", 0),
    "--n=nan: give 1 or more": lambda: limits.check("--n", float("nan")),
    "--n=2.5: give a whole number": lambda: limits.check("--n", 2.5),
    "2147483648: give 2147483647 or less": lambda: limits.check("--n", 2**31),
    "--s=-1: give a whole": lambda: limits.check_seed("--s", -1),
    "--s=4294967296: give a whole": lambda: limits.check_seed("--s", 2**32),
  }.items():
    with pytest.raises(errors.UserError, match=re.escape(name)):
      call()


def test_lists_of_numbers():
  assert limits.whole_numbers("--l", ["3", 4]) == [3, 4]
  assert limits.whole_numbers("--l", []) == []
  for bad in ("", "x", "-1", "1.5", "0", "9" * 5000, "2147483648", "²"):
    with pytest.raises(errors.UserError, match="--l=") as caught:
      limits.whole_numbers("--l", ["1", bad])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
  "head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# \xe9\n"]
)
def test_a_config_of_any_encoding(head, tmp_path):
  path = tmp_path / "config.py"
  path.write_bytes(
    head + b"from memcomp.config import Config\n"
    b"def get_config():\n  return Config(name='read')\n"
  )
  assert cli.load_config(str(path)).name == "read"


def test_a_program_is_not_bound_by_the_promotion_that_others_forbid():
  code = (
    "import sys; from memcomp import cli; sys.argv[:] = ['x']\n"
    "def program():\n"
    "  import jax.numpy as jnp\n"
    "  print(jnp.ones((2, 3), jnp.bfloat16) + jnp.ones(3, jnp.float32))\n"
    "cli.main(program, usage='')"
  )
  strict = {
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
  }
  for before in ("", "import jax\n"):
    done = subprocess.run(
      [sys.executable, "-c", before + code],
      env=os.environ | strict,
      capture_output=True,
      text=True,
      check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_disk_errors_are_found_in_the_text_of_libraries():
  inner = ValueError("tensorstore: write failed [No space left on device]")
  try:
    raise RuntimeError("save failed") from inner
  except RuntimeError as error:
    assert "free some space" in errors.explain(error)
  assert errors.explain(ValueError("shape mismatch")) is None
