"""Checks whether and how this machine can run memcomp.

  memcomp doctor
  memcomp doctor --all

It checks versions, devices, the implementation of each memory and why, a layer,
and two memories against their definitions. --all checks every memory, which
takes minutes. Exit codes: 0 if all is well, 1 if something needs a fix (listed
at the end).
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import operator
import os
import pathlib
import platform
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import memcomp
from memcomp import platforms, streams

Line = tuple[bool, str]
"""(whether all is well, the finding and, if something is wrong, the fix)."""

SELF_TEST_BOUND = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative RMS error that separates a broken installation from a sound one; the
tests have much tighter bounds."""

QUICK = ("linear_attention", "state_space_duality")
"""The memories that compile fastest; tested without --all."""

_NAME = re.compile(r"[\w.-]+")
_RANGE = re.compile(r"[<>=][<>=.,\d\s]*")
_CONDITION = re.compile(r"([<>=]+)([\d.]+)")
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
  ">=": operator.ge,
  ">": operator.gt,
  "<": operator.lt,
  "<=": operator.le,
  "==": operator.eq,
}


def main(argv: list[str] | None = None) -> int:
  """Prints all checks; returns the exit code."""
  streams.prepare()
  parser = argparse.ArgumentParser(
    prog="memcomp doctor",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--all", action="store_true", help="test every memory, which takes minutes"
  )
  checks = dict(CHECKS)
  if parser.parse_args(argv).all:
    checks |= {"self-test": functools.partial(self_test, everything=True)}
  problems = []
  for title, check in checks.items():
    print(title, flush=True)
    try:
      for in_order, text in check():
        print(f"  {'  ' if in_order else '! '}{text}", flush=True)
        if not in_order:
          problems.append(text)
    except Exception as error:
      # A broken installation may fail anywhere, so the other checks must still
      # run.
      name = f"{type(error).__name__}: {_first_line(error)}"
      text = f"{title}: {platforms.reason(error) or name}"
      print(f"  ! {text}", flush=True)
      problems.append(text)
  if not problems:
    print("OK: everything is in order")
    return 0
  print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:")
  for text in problems:
    print(f"  - {text}")
  return 1


def check_versions() -> Iterator[Line]:
  """Compares the versions of Python and libraries with the requirements."""
  folder = pathlib.Path(memcomp.__file__).parent
  yield True, f"memcomp {memcomp.__version__} in {folder}"
  python, required, optional = requirements()
  version = platform.python_version()
  yield _version_line("python", version, python)
  for name, wanted in required.items():
    yield _version_line(name, _installed(name), wanted)
  for (extra, name), wanted in optional.items():
    version = _installed(name)
    if version is None:
      yield True, f"{name} not installed (optional: extra {extra})"
    else:
      yield _version_line(name, version, wanted)


def check_devices() -> Iterator[Line]:
  """Lists the devices that JAX sees."""
  import jax

  devices = jax.devices()
  kinds = sorted({d.device_kind for d in devices})
  yield True, f"{len(devices)} x {devices[0].platform}: {', '.join(kinds)}"
  if devices[0].platform == "cpu":
    for path, what, extra in (
      ("/dev/nvidia0", "an NVIDIA GPU", "cuda13"),
      ("/dev/accel0", "a TPU", "tpu"),
    ):
      if os.path.exists(path):
        yield (
          True,
          (
            f"note: there seems to be {what} ({path}) that JAX does not use; "
            f"pip install 'memcomp[{extra}]'"
          ),
        )


def check_machine() -> Iterator[Line]:
  """Reports processors and memory, and writes and reads back a file."""
  yield True, f"{platforms.cores()} processor cores"
  if "SC_PHYS_PAGES" in os.sysconf_names:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield True, f"{size / 2**30:.1f} GiB of memory"
  free = shutil.disk_usage(".").free
  yield True, f"{free / 2**30:.1f} GiB free in the current folder"
  if not os.access(".", os.W_OK):
    yield True, "note: the current folder cannot be written; use --workdir"
  content = bytes(range(256)) * 4096
  try:
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / "file"
      path.write_bytes(content)
      same = path.read_bytes() == content
  except OSError as error:
    yield (
      False,
      (
        f"cannot write a temporary file ({_first_line(error)}); free some "
        "space, or set TMPDIR"
      ),
    )
    return
  if same:
    yield True, "temporary files can be written and read back"
  else:
    yield False, "a temporary file came back changed; check the disk"


def check_implementations() -> Iterator[Line]:
  """Reports the implementation that each memory uses here, and why."""
  from memcomp.layers import registry
  from memcomp_kernels import dispatch

  where = dispatch.current_platform()
  for name in registry.MIXERS:
    have = registry.MIXERS[name].op.implementations
    chosen = have.default(where)
    yield True, f"{name}: {chosen} ({have.reason(where)})"


def check_layer() -> Iterator[Line]:
  """Builds a layer and calls it, like user code."""
  import jax.numpy as jnp
  import numpy as np
  from flax import nnx

  from memcomp.layers import Trellis

  x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 24, 512)))
  with _quick_compilation():
    layer = Trellis(512, heads=8, rngs=nnx.Rngs(0))
    y = layer(x)
    finite = bool(jnp.isfinite(y).all())
  text = "Trellis(512, heads=8, rngs=nnx.Rngs(0))"
  if finite:
    yield True, f"{text}: built and called"
  else:
    yield False, f"{text}: values are not finite; {_WRONG}"


def self_test(everything: bool = False) -> Iterator[Line]:
  """Compares memories with their definitions: values and gradients.

  Args:
    everything: whether to test all memories instead of `QUICK`.
  """
  from memcomp_kernels import dispatch
  from memcomp_kernels.testing import memories

  where = dispatch.current_platform()
  left_out = []
  for memory in memories.MEMORIES.values():
    if not everything and memory.name not in QUICK:
      left_out.append(memory.name)
      continue
    have = memory.op.implementations
    chosen = have.default(where)
    names = {chosen, "xla_chunked"} & set(have.functions) - {"reference"}
    for name in sorted(names):
      yield _compared(memory, name)
  if left_out:
    yield True, f"not tested without --all: {', '.join(left_out)}"


def _compared(memory, name: str) -> Line:
  """Compares an implementation of a memory with its definition."""
  start = time.monotonic()
  said = ""
  for dtype in SELF_TEST_BOUND:  # the first call that the implementation can do
    try:
      with _quick_compilation():
        error = _largest_error(memory, name, dtype)
      break
    except NotImplementedError as reason:
      said = _first_line(reason)
  else:
    return True, f"{memory.name}: {name} not tested: {said}"
  text = (
    f"{memory.name}: {name} against reference, values and gradients: "
    f"largest error {error:.1e} in {dtype}"
  )
  bound = SELF_TEST_BOUND[dtype]
  if error <= bound:  # nan is not
    return True, f"{text} ({time.monotonic() - start:.1f} s)"
  return False, f"{text}, more than {bound:.0e}; {_WRONG}"


_WRONG = (
  "results on this machine are wrong: install the versions of constraints.txt,"
  " and report it if that does not help"
)


@contextlib.contextmanager
def _quick_compilation() -> Iterator[None]:
  """Disables XLA optimizations where they dominate the compile time."""
  import jax

  name = "jax_disable_most_optimizations"
  before = jax.config.read(name)
  jax.config.update(name, before or jax.default_backend() == "cpu")
  try:
    yield
  finally:
    jax.config.update(name, before)


CHECKS: dict[str, Callable[[], Iterator[Line]]] = {
  "versions": check_versions,
  "devices": check_devices,
  "machine": check_machine,
  "implementations": check_implementations,
  "layer": check_layer,
  "self-test": self_test,
}


def requirements() -> tuple[str, dict[str, str], dict[tuple[str, str], str]]:
  """Returns the requirements of memcomp from their only list.

  Returns:
    The range of Python versions; library -> range; (extra, library) -> range
    for libraries that only extras need.
  """
  project = pathlib.Path(__file__).parents[1] / "pyproject.toml"
  if project.exists():
    # In a checkout, pyproject.toml is newer than the installed metadata.
    spec = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    python = spec["requires-python"]
    lines = [("", line) for line in spec["dependencies"]]
    for extra, group in spec["optional-dependencies"].items():
      lines += [(extra, line) for line in group]
  else:
    metadata = importlib.metadata.metadata("memcomp")
    python = metadata["Requires-Python"]
    lines = []
    for line in importlib.metadata.requires("memcomp") or ():
      extra = re.search(r"extra == ['\"]([\w-]+)", line)
      lines.append((extra[1] if extra else "", line.partition(";")[0]))
  required, optional = {}, {}
  # Name a library by the extra that offers it, not by one that tests it.
  for extra, line in sorted(lines, key=lambda x: x[0] in ("test", "dev")):
    name = "".join(_NAME.findall(line)[:1])
    wanted = "".join(_RANGE.findall(line)[:1]).strip()
    if not extra:
      required[name] = wanted
    elif name not in ("jax", "memcomp") and not any(
      name == other for _, other in optional
    ):
      optional[extra, name] = wanted
  return python, required, optional


def fits(version: str, wanted: str) -> bool:
  """Whether a version lies in a range such as ">=0.11.2,<0.13"."""
  for order, bound in _CONDITION.findall(wanted):
    a, b = _numbers(version), _numbers(bound)
    size = max(len(a), len(b))
    a, b = a + [0] * (size - len(a)), b + [0] * (size - len(b))
    if not _ORDER[order](a, b):
      return False
  return True


def _numbers(version: str) -> list[int]:
  """Returns [0, 12, 1] for "0.12.1.dev3+cuda"."""
  release = "".join(re.findall(r"^[\d.]*", version))
  return [int(x) for x in release.split(".") if x]


def _version_line(name: str, version: str | None, wanted: str) -> Line:
  if version is None:
    return False, f"{name} is not installed; pip install '{name}{wanted}'"
  if fits(version, wanted):
    return True, f"{name} {version}"
  fix = f"pip install '{name}{wanted}'"
  if name == "python":
    fix = "use another interpreter"
  return False, f"{name} {version} does not satisfy {wanted}; {fix}"


def _installed(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _largest_error(memory, implementation: str, dtype: str) -> float:
  """Returns the largest relative RMS error of y, states and gradients.

  Args:
    memory: a `memory.Memory`.
    implementation: the one to compare with the reference.
    dtype: "float32" for a small call, "bfloat16" for one of sizes that kernels
      for GPUs want; the reference computes in float32.
  """
  import jax
  import numpy as np

  from memcomp_kernels.testing import errors, gradients

  spec = next(iter(memory.specs.values()))
  sizes = {"batch": 2, "heads": 2, "key_dim": 16, "value_dim": 24}
  if dtype == "bfloat16":
    sizes |= {"key_dim": 64, "value_dim": 64}
    if hasattr(spec, "num_slots"):
      spec = dataclasses.replace(spec, num_slots=64)
  # XLA takes seconds to compile the default generator.
  keys = [jax.random.key(seed, impl="rbg") for seed in (0, 1)]
  # No chunk or tile divides this time.
  inputs = memory.make_inputs(keys[0], spec, time=45, **sizes)
  inputs = gradients.cast_operands(inputs, dtype)
  state = memory.make_state(keys[1], spec, **sizes)

  def run(name, inputs):
    function = functools.partial(
      memory.op.chunk, spec=spec, implementation=name
    )
    found = gradients.value_and_gradients(function, (state, inputs))
    return jax.tree.leaves(found)

  wide = gradients.cast(inputs, "float32")
  pairs = zip(run(implementation, inputs), run("reference", wide), strict=True)
  worst = [errors.relative_rms(a, b) for a, b in pairs]
  # max() could ignore a nan.
  return float(np.max(worst))


def _first_line(error: Exception) -> str:
  return (str(error).strip().splitlines() or ["no message"])[0]


if __name__ == "__main__":
  sys.exit(main())
