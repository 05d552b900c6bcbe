"""The report on a compiled training step, as text and as data."""

from collections.abc import Iterable
from typing import Any

from memcomp.compiling import program as program_lib

MIB = 2**20


def collectives(
  found: Iterable[program_lib.Collective],
) -> dict[str, dict[str, int]]:
  """Executions and bytes of each kind, and its executions in inner loops.

  The outer loops run over layers or parts of the loss. An inner loop runs over
  chunks of a memory, which should need no collective.
  """
  kinds: dict[str, dict[str, int]] = {}
  for one in found:
    row = kinds.setdefault(
      one.kind, {"executions": 0, "bytes": 0, "in_inner_loops": 0}
    )
    row["executions"] += one.executions
    row["bytes"] += one.executions * one.bytes
    row["in_inner_loops"] += one.executions * (one.loops > 1)
  return dict(sorted(kinds.items()))


def largest(found: Iterable[program_lib.Collective]) -> list[dict[str, Any]]:
  """The collectives that move the most bytes, as rows."""
  ordered = sorted(found, key=lambda c: -c.executions * c.bytes)
  return [
    {
      "kind": c.kind,
      "executions": c.executions,
      "bytes": c.bytes,
      "shape": c.shape,
      "source": c.source,
    }
    for c in ordered[:8]
  ]


def text(found: dict[str, Any]) -> str:
  """Formats the report as text."""
  memory, flops = found["memory_per_device"], found["flops"]
  lines = [
    f"{found['name']} on {found['topology']}"
    f"{f' x {found["slices"]} slices' if found['slices'] > 1 else ''}:"
    f" {found['devices']} x"
    f" {found['device_kind']}, mesh {_mesh(found['mesh'])}",
    f"  {found['rows']} rows of {found['sequence_length']:,} tokens a step",
    f"  compiled in {found['seconds']['compile']:.0f} s (traced in"
    f" {found['seconds']['trace']:.0f} s)",
    f"memory of a device, MiB: {memory['total'] / MIB:,.0f} of"
    f" {_mib(memory['available'])}: arguments"
    f" {memory['arguments'] / MIB:,.0f} (donated), temporaries"
    f" {memory['temporaries'] / MIB:,.0f}, code"
    f" {memory['code'] / MIB:,.0f}",
    f"flops of a step: {flops['program']:.3e} in the program,"
    f" {flops['model']:.3e} of the model, {flops['ratio']:.2f} times",
    "kernels, executions a step: "
    + (
      ", ".join(f"{n} {k}" for k, n in found["kernels"].items())
      or "none, the XLA forms"
    ),
    "collectives of a device and step:",
    *_collectives(found["collectives"], found["largest"]),
  ]
  if found["slices"] > 1:
    lines += [
      "sent between slices (DCN), by a device and step:",
      *_collectives(found["between_slices"], found["largest_between_slices"]),
    ]
  if found["unknown_loops"]:
    lines.append(
      f"loops of unknown length, counted once: {found['unknown_loops']}"
    )
  return "\n".join(lines)


def _collectives(
  kinds: dict[str, dict[str, int]], largest: list[dict[str, Any]]
) -> list[str]:
  lines = []
  for kind, row in kinds.items():
    inner = row["in_inner_loops"]
    warning = f"; {inner} of them in inner loops" if inner else ""
    lines.append(
      f"  {kind}: {row['executions']}, {row['bytes'] / MIB:,.1f} MiB{warning}"
    )
  lines.append("those that move most:" if largest else "  none")
  for row in largest:
    lines.append(
      f"  {row['executions']} x {row['bytes'] / MIB:,.1f} MiB {row['kind']}"
      f" {row['shape'].partition('{')[0]} {row['source'][-60:]}"
    )
  return lines


def _mesh(mesh: dict[str, int]) -> str:
  return " x ".join(f"{name} {size}" for name, size in mesh.items())


def _mib(size: int | None) -> str:
  return "unknown" if size is None else f"{size / MIB:,.0f}"
