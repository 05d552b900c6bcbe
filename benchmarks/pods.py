r"""Compiles training steps for pods that need not be attached, as a table.

  python benchmarks/pods.py
  python benchmarks/pods.py --names=lattice-350m --row_lengths=2048,8192
  python benchmarks/pods.py --only_text

Run it from the repository's root; it needs the extra `aot`. Each row is one
`train.py --compile_only` in a separate process, with half a million tokens per
step and the mesh of `mesh_of`. Rows that are already in the results are
skipped, so the same command resumes. It also writes the table as text beside
the results.
"""

import itertools
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags

from memcomp import cli, limits, sharding
from memcomp.compiling import report

Row = dict[str, Any]
"""What is known of a row of the results, as JSON."""

TOKENS = 2**19
"""Tokens per step, as in the papers."""

MEMORIES = (
  "trellis",
  "lattice",
  "key_value_means",
  "tensor_cache",
  "softmax_attention",
)
SETTINGS = {"model.remat": "memories", "data.packing": "joined"}
"""Settings of all rows: kernels run forward once, rows have one segment."""
OWN = {"trellis": {"model.mixers.memory.chunk_size": 64}}
"""Settings of some memories: chunks of 16, the default, cost more."""

_NAMES = flags.DEFINE_list(
  "names",
  [f"{memory}-{size}" for size in ("125m", "1b") for memory in MEMORIES],
  "Models of configs/lm.py.",
)
_TOPOLOGIES = flags.DEFINE_list(
  "topologies", ["v5e:16x16", "v5p:4x4x4", "v6e:16x16", "tpu7x:2x2x2"], "TPUs."
)
_LENGTHS = flags.DEFINE_list(
  "row_lengths", ["2048", "8192", "32768"], "Tokens per row."
)
_RESULTS = cli.DEFINE_path(
  "results",
  "docs/results/pods.json",
  "JSON results; text goes to the same .md.",
)
_SECONDS = flags.DEFINE_integer(
  "seconds", 600, "Time limit of a compilation.", 1
)
_ONLY_TEXT = flags.DEFINE_bool("only_text", False, "Compile nothing.")


def mesh_of(devices: int, rows: int, d_model: int) -> dict[str, int]:
  """The mesh of a table row.

  It has as many batch shards as the rows allow. `sharding.widest_fsdp` of them
  are `fsdp`, the others are replicas. The remaining devices share time.

  Args:
    devices: number of devices in the topology.
    rows: number of batch rows.
    d_model: width of the model.

  Returns:
    Sizes of the axes replica, fsdp and context.
  """
  shards = math.gcd(rows, devices)
  fsdp = sharding.widest_fsdp(d_model, shards)
  context = devices // shards
  return {"replica": shards // fsdp, "fsdp": fsdp, "context": context}


def command(
  name: str, topology: str, length: int, devices: int, workdir: str
) -> list[str]:
  """The command of a table row."""
  from memcomp.models import presets

  model = presets.language_model(name)
  rows = max(TOKENS // length, 1)
  mesh = mesh_of(devices, rows, model.d_model)
  settings = {
    **SETTINGS,
    **OWN.get(name.rpartition("-")[0], {}),
    **{f"mesh.{axis}": size for axis, size in mesh.items()},
    "data.sequence_length": length,
    "training.batch_size": rows,
  }
  return [
    sys.executable,
    "train.py",
    f"--config=configs/lm.py:{name}",
    "--compile_only",
    "--compilation_cache=off",
    f"--topology={topology}",
    f"--workdir={workdir}",
    *(f"--config.{field}={value}" for field, value in settings.items()),
  ]


def one(name: str, topology: str, length: int, seconds: int) -> Row:
  """Compiles a row: returns its report, or the "reason" why it has none."""
  from memcomp.compiling import chips

  row: Row = {
    "name": name,
    "topology": topology,
    "length": length,
  }
  devices = len(chips.devices(topology))
  with tempfile.TemporaryDirectory() as folder:
    line = command(name, topology, length, devices, folder)
    row["settings"] = [x for x in line if x.startswith("--config.")]
    try:
      done = subprocess.run(
        line, capture_output=True, text=True, timeout=seconds, check=False
      )
    except subprocess.TimeoutExpired:
      return row | {"reason": f"not compiled in {seconds} s"}
    for path in pathlib.Path(folder).glob("compile_only/*.json"):
      found = json.loads(path.read_text())
      del found["name"], found["topology"], found["largest"]
      return row | found
  return row | {"reason": reason(done.stderr)}


def reason(stderr: str) -> str:
  """The line of an error message that states the problem."""
  lines = [line.strip() for line in stderr.splitlines() if line.strip()]
  named = [
    x for x in lines if re.match(r"(error:|[\w.]*(Error|Exception)\b)", x)
  ]
  return (named or lines or ["no message"])[-1][:300]


_HEAD = """# Training steps compiled for pods

{verdict}

The TPU compiler compiled each step for all chips of a topology. **None ran on a
TPU**, so nothing here says how fast a step is. Tokens per step: {tokens:,}.

    python benchmarks/pods.py

Models are those of `configs/lm.py`. [Compile for pods](../pods.md) explains
what is counted. `docs/results/pods.json` has more of each step: its settings,
kernels, kinds of collectives, and the time to compile.
"""


def text(rows: Iterable[Row], wanted: Iterable[tuple[str, str, int]]) -> str:
  """The page: all rows, and the wanted ones without a result."""
  known = {(r["name"], r["topology"], r["length"]): r for r in rows}
  keys = list(dict.fromkeys([*wanted, *known]))
  sections = (
    (
      "Memory",
      "GiB per device, and the share of the device's memory.",
      _memory,
    ),
    (
      "Work",
      "Flops of the program over those of the model. What is above 1 is"
      " recomputation, and work that shards of time do twice.",
      lambda row: f"{row['flops']['ratio']:.2f}",
    ),
    (
      "Traffic",
      "MiB of all collectives, per device and step. TPU7x gathers and scatters"
      " in loops of unknown length. Each of them counts as one turn, so its"
      " figures are too low.",
      lambda row: f"{_moved(row):,.0f}",
    ),
    ("Meshes", "Devices along each axis of the mesh.", _mesh),
  )
  parts = [_HEAD.format(verdict=_verdict(known), tokens=TOKENS)]
  for title, said, cell in sections:
    table = _pivot(known, keys, cell, merged=cell is _mesh)
    parts.append(f"\n## {title}\n\n{said}\n\n{table}\n")
  failed = [
    f"{_called(key)}: {said}"
    for key in keys
    if (said := _failure(known.get(key, {})))
  ]
  missing = [_called(k) for k in keys if k not in known]
  for title, lines in (("No program", failed), ("Not compiled yet", missing)):
    if lines:
      parts.append(f"\n## {title}\n\n" + "".join(f"- {x}\n" for x in lines))
  return "".join(parts)


def _called(key: tuple[str, str, int]) -> str:
  name, topology, length = key
  return f"{name} on {topology}, {length:,} tokens a row"


def _failure(row: Row) -> str:
  """The first sentence of why a row has no program; empty if it has one."""
  said, *_ = row.get("reason", "").removeprefix("error: ").split(". ")
  return said.replace("|", "/")


def _share(row: Row) -> float:
  memory = row["memory_per_device"]
  return memory["total"] / memory["available"]


def _verdict(known: dict[tuple[str, str, int], Row]) -> str:
  without = [
    key for key, row in known.items() if "reason" in row or _share(row) > 1
  ]
  fit = len(known) - len(without)
  said = f"**{fit} of {len(known)} training steps fit into their chips.**"
  if without:
    said += " Too large: " + "; ".join(map(_called, without)) + "."
  return said


def _pivot(
  known: dict[tuple[str, str, int], Row],
  keys: list[tuple[str, str, int]],
  cell: Callable[[Row], str],
  *,
  merged: bool,
) -> str:
  """A table with a row per length and model, and a column per topology.

  Args:
    known: rows by (name, topology, length).
    keys: the rows of the table, in order.
    cell: what a row's cell says.
    merged: whether models with equal cells share a row.
  """
  topologies = list(dict.fromkeys(topology for _, topology, _ in keys))
  found: dict[tuple[Any, ...], list[str]] = {}
  for name, length in dict.fromkeys((name, length) for name, _, length in keys):
    cells = []
    for topology in topologies:
      row = known.get((name, topology, length))
      cells.append(
        "" if row is None else "none" if "reason" in row else cell(row)
      )
    found.setdefault((length, *cells, "" if merged else name), []).append(name)
  lines = [["tokens a row", "model", *topologies], ["---:", "---"]]
  lines[1] += ["---:"] * len(topologies)
  for (length, *cells, _), names in found.items():
    lines.append([f"{length:,}", ", ".join(names), *cells])
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _memory(row: Row) -> str:
  return f"{row['memory_per_device']['total'] / 2**30:.2f} ({_share(row):.1%})"


def _moved(row: Row) -> float:
  """MiB of all collectives."""
  return sum(x["bytes"] for x in row["collectives"].values()) / report.MIB


def _mesh(row: Row) -> str:
  return ", ".join(f"{a} {n}" for a, n in row["mesh"].items() if n > 1) or "1"


def _summary(row: Row) -> str:
  """A line about a row that was just compiled."""
  if failure := _failure(row):
    return failure
  return (
    f"{_memory(row)} GiB, flops {row['flops']['ratio']:.2f},"
    f" {_moved(row):,.0f} MiB moved, {row['seconds']['compile']:.0f} s"
  )


def main() -> int:
  """Compiles the missing rows; returns an exit code."""
  import jax

  jax.config.update("jax_platforms", "cpu")
  path = pathlib.Path(_RESULTS.value)
  rows = json.loads(path.read_text()) if path.exists() else []
  done = {(r["name"], r["topology"], r["length"]) for r in rows}
  # Ordered by length, then model, so that small and short ones come first.
  lengths = limits.whole_numbers("--lengths", _LENGTHS.value)
  wanted: list[tuple[str, str, int]] = [
    (name, topology, length)
    for length, name, topology in itertools.product(
      lengths, _NAMES.value, _TOPOLOGIES.value
    )
  ]
  for key in [] if _ONLY_TEXT.value else wanted:
    if key in done:
      continue
    print(*key, flush=True)
    name, topology, length = key
    rows.append(one(name, topology, length, seconds=_SECONDS.value))
    print("  " + _summary(rows[-1]), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
  path.with_suffix(".md").write_text(text(rows, wanted))
  return 0


if __name__ == "__main__":
  cli.main(main, usage=__doc__)
