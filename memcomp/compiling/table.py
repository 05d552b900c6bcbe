r"""Compiles training steps for pods that need not be attached, as a table.

  python -m memcomp.compiling.table
  python -m memcomp.compiling.table --names=lattice-350m --row_lengths=2048,8192
  python -m memcomp.compiling.table --only_text

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
from collections.abc import Collection, Iterable
from typing import Any

from absl import flags

from memcomp import cli, limits, sharding
from memcomp.compiling import report

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


def one(name: str, topology: str, length: int, seconds: int) -> dict[str, Any]:
  """Compiles a row: returns its report, or the "reason" why it has none."""
  from memcomp.compiling import chips

  row: dict[str, Any] = {
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

Written by `python -m memcomp.compiling.table`; [how and why](../pods.md). Each
step has half a million tokens. Memory is per device, and `of` is its share of
the device's memory. Flops are the program's over the model's. Kernels have
their executions per step (all branches of a conditional count). Collectives
have executions and MiB, per device and step. On TPU7x, gathers and scatters are
loops of permutes inside products, so they count as inner loops. A loop of
unknown length counts as one turn, so these MiB are too low. Seconds are for two
cores that also did other work. Nothing here ran on a TPU.

"""


def text(
  rows: Iterable[dict[str, Any]], wanted: Iterable[tuple[str, str, int]]
) -> str:
  """The page: all rows, and the wanted ones without a result."""
  known = {(r["name"], r["topology"], r["length"]): r for r in rows}
  lines = [
    "| model | chips | tokens a row | mesh | arguments, temporaries, all, MiB |"
    " of | flops | kernels | gathered | scattered | reduced | other | in inner"
    " loops | compiled, s |",
    "|" + "---|" * 14,
  ]
  missing: dict[tuple[str, int], list[str]] = {}
  for name, topology, length in dict.fromkeys([*wanted, *known]):
    if row := known.get((name, topology, length)):
      cells = [name, topology, f"{length:,}", *_cells(row)]
      lines.append("| " + " | ".join(cells) + " |")
    else:
      missing.setdefault((name, length), []).append(topology)
  lines += ["", "Not compiled yet:", ""] if missing else []
  for (name, length), topologies in missing.items():
    lines.append(f"- {name}, {length:,} tokens a row: {', '.join(topologies)}")
  return _HEAD + "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
  if "reason" in row:
    said, *_ = row["reason"].removeprefix("error: ").split(". ")
    return [said.replace("|", "/"), *[""] * 10]
  memory, kinds = row["memory_per_device"], dict(row["collectives"])
  mib = {
    k: memory[k] / report.MIB for k in ("arguments", "temporaries", "total")
  }
  inner = sum(kind["in_inner_loops"] for kind in kinds.values())
  cells = [_moved([kinds.pop(k)] if k in kinds else []) for k in _KINDS]
  return [
    " x ".join(f"{a} {n}" for a, n in row["mesh"].items() if n > 1) or "1",
    ", ".join(f"{n:,.0f}" for n in mib.values()),
    f"{memory['total'] / memory['available']:.1%}",
    f"{row['flops']['ratio']:.2f}",
    ", ".join(f"{n} {k}" for k, n in row["kernels"].items()) or "none",
    *cells,
    _moved(kinds.values()),
    str(inner),
    f"{row['seconds']['compile']:.0f}",
  ]


_KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def _moved(kinds: Collection[dict[str, int]]) -> str:
  """Number of executions, and total MiB."""
  number = sum(kind["executions"] for kind in kinds)
  mib = sum(kind["bytes"] for kind in kinds) / report.MIB
  return f"{number}, {mib:,.0f}" if kinds else "0"


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
    print("  " + ", ".join(_cells(rows[-1])), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
  path.with_suffix(".md").write_text(text(rows, wanted))
  return 0


if __name__ == "__main__":
  cli.main(main, usage=__doc__)
