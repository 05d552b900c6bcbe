"""What the TPU compiler says of a program: cycles, units, bytes.

Kernels are counted from the compiler's dump of their schedule, one row a cycle
of the body with its stalls; other programs from the cycles that the compiler
estimates for each operation, times the trips of the loops around it. Both are
static: neither waiting for memory nor a clock is in them.
"""

import collections
import contextlib
import glob
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

UNITS = (
  "MXU",
  "XLU",
  "VALU",
  "VPOP",
  "EUP",
  "VLOAD",
  "VLOAD:FILL",
  "VSTORE",
  "VSTORE:SPILL",
  "SALU",
)
"""Columns of the compiler's table of issue slots."""


class Schedule(NamedTuple):
  """A kernel's body, one grid step.

  Attributes:
    cycles: with stalls: the figure to steer by.
    bundles: without them; it can fall below what is possible.
    utilisation: share of each unit's slots that is used, of `cycles`.
    spills: registers stored for want of others.
  """

  cycles: int
  bundles: int
  utilisation: dict[str, float]
  spills: int


@contextlib.contextmanager
def dumping() -> Iterator[pathlib.Path]:
  """A folder for the compiler's dumps; enter before the first compilation."""
  # A program that comes from a cache leaves no dump.
  jax.config.update("jax_enable_compilation_cache", False)
  folder = tempfile.mkdtemp(prefix="memcomp-llo-")
  os.environ["LIBTPU_INIT_ARGS"] = (
    f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
  )
  try:
    yield pathlib.Path(folder)
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def _table(path: str) -> tuple[list[int], list[list[int]]]:
  """The slots that a cycle has, and those used in each."""
  rows = [
    [int(x) for x in line.split()]
    for line in pathlib.Path(path).read_text().splitlines()
    if re.fullmatch(r"\s*\d+(\s+\d+)+\s*", line)
  ]
  return rows[0], rows[1:]


def _repeats(path: str, trips: int) -> list[int]:
  """How often each bundle of a listing runs: those of inner loops `trips`."""
  found, depth = [], 0
  for line in pathlib.Path(path).read_text().splitlines():
    bundle = re.match(r"\s*(?:0x[0-9a-f]+|0) [A-Z ]*:\s*(>*)\s*\{(\}?)", line)
    if bundle:
      # An empty one does not say where it is. The grid is a loop itself.
      depth = depth if bundle[2] else len(bundle[1])
      found.append(trips if depth > 1 else 1)
  return found


def schedule(folder: pathlib.Path, kernel: str, trips: int = 1) -> Schedule:
  """The schedule of the last kernel of that name that was compiled.

  Args:
    folder: of the compiler's dumps.
    kernel: its name.
    trips: of each loop in its body, not nested; the compiler lists them once.

  Raises:
    RuntimeError: the compiler dumped none.
  """

  def newest(ending: str) -> str:
    found = glob.glob(f"{folder}/*-{kernel}[.-]*[0-9]-{ending}.txt")
    if not found:
      raise RuntimeError(f"the TPU compiler dumped no schedule of {kernel}")
    return max(found)

  def counted(table: str, listing: str) -> tuple[list[int], list[list[int]]]:
    table = newest(f"{table}_hlo-static-per-bundle-utilization")
    slots, rows = _table(table)
    repeats = _repeats(newest(listing), trips)
    if len(repeats) != len(rows):
      raise RuntimeError(
        f"{kernel}: {len(rows)} rows of a table, {len(repeats)} bundles listed"
      )
    return slots, [
      r for r, n in zip(rows, repeats, strict=True) for _ in range(n)
    ]

  slots, cycles = counted("pre-delay", "packed-bundles-post-ra")
  _, bundles = counted("final", "final_bundles")
  used = dict(zip(UNITS, map(sum, zip(*cycles, strict=True)), strict=False))
  capacity = dict(zip(UNITS, slots, strict=False))
  return Schedule(
    cycles=len(cycles),
    bundles=len(bundles),
    utilisation={
      unit: round(used[unit] / (capacity[unit] * len(cycles)), 3)
      for unit in UNITS
    },
    spills=used["VSTORE:SPILL"],
  )


def kernel_call(traced: Any) -> Any:
  """The one Pallas call in a traced program.

  Raises:
    ValueError: there is none, or more than one.
  """

  def calls(jaxpr):
    for equation in jaxpr.eqns:
      if equation.primitive.name == "pallas_call":
        yield equation
      else:
        for parameter in jax.tree.leaves(list(equation.params.values())):
          inner = getattr(parameter, "jaxpr", parameter)
          if hasattr(inner, "eqns"):
            yield from calls(inner)

  (call,) = calls(traced.jaxpr)
  return call


def num_bytes(tree: Any) -> int:
  """Bytes of the arrays in a tree."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def moved_bytes(call: Any) -> int:
  """Bytes to and from main memory, where each block is visited once."""
  return num_bytes([v.aval for v in (*call.invars, *call.outvars)])


def vmem_bytes(call: Any) -> int:
  """Bytes of a kernel's blocks in two buffers each, and of its scratch."""
  grid = call.params["grid_mapping"]
  blocks = sum(
    2 * math.prod(b.block_aval.shape) * b.block_aval.dtype.itemsize
    for b in grid.block_mappings
  )
  scratch = grid.scratch_avals
  return blocks + sum(math.prod(x.shape) * x.dtype.itemsize for x in scratch)


def estimated_cycles(text: str, *trips: int) -> int:
  """Cycles of a compiled program, by the compiler's own estimates.

  Args:
    text: of the program.
    *trips: of its loops, the outermost first: the text does not say.
  """
  bodies: dict[str, list[str]] = collections.defaultdict(list)
  name = entry = None
  for line in text.splitlines():
    opening = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
    if opening and not line.startswith(" "):
      name = opening[2]
      entry = name if opening[1] else entry
    elif name and line.startswith("  "):
      bodies[name].append(line)

  def cycles(computation: str, depth: int = 0) -> int:
    total = 0
    for line in bodies[computation]:
      estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
      loop = re.search(r" while\(.*body=%?([\w.-]+)", line)
      if loop:
        if depth == len(trips):
          raise ValueError(f"a loop within a loop: {loop[1]}")
        total += trips[depth] * cycles(loop[1], depth + 1)
      elif estimate:
        total += int(estimate[1])
    return total

  if entry is None:
    raise RuntimeError("the program has no entry")
  return cycles(entry)


def write_rows(path: str, rows: list[dict[str, Any]]) -> None:
  """Writes rows as JSON, one a line."""
  lines = ",\n".join(json.dumps(row) for row in rows)
  pathlib.Path(path).write_text(f"[\n{lines}\n]\n")
