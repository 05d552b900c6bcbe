"""Parses the text of a program from the TPU compiler.

Counting in the text has two traps. A collective that overlaps with other work
occurs several times: at its start, at its end and in every overlapping fusion.
All have the same channel. And the text does not state how often a loop runs,
but a constant in its condition may.

A transfer between slices (DCN) is a send to, and a receive from, the host's
runtime, which executes the collective ("megascale").
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)

_OPENING = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = (.*)$")
_KIND = re.compile(r"[)\]}] ([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)")
_BRANCHES = re.compile(
  r"branch_computations=\{([^}]*)\}"
  r"|true_computation=%?([\w.-]+), false_computation=%?([\w.-]+)"
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_GROUPS = re.compile(
  r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{[{}\d,]*\})"
)
_BETWEEN = re.compile(
  r'_xla_megascale_target="([^"]*)",_xla_megascale_transfer_type="(\w+)"'
)
_MANUAL = 1
_NAMED = re.compile(r'op_name="([^"]*)"')
_CONSTANT = re.compile(r"%([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"compare\(([^)]*)\), direction=(LT|GT|LE|GE)")


class Collective(NamedTuple):
  """A collective operation.

  Attributes:
    kind: one of `COLLECTIVES`.
    channel: channel number; negative if the text has none.
    bytes: size of one result, or of one operand for "reduce-scatter".
    executions: number of executions per run of the program.
    loops: number of enclosing loops.
    shape: shape of the result, as in the text.
    groups: participating devices, as in the text.
    source: its place in the Python program.
  """

  kind: str
  channel: int
  bytes: int
  executions: int
  loops: int
  shape: str
  groups: str
  source: str


class Kernel(NamedTuple):
  """A Pallas kernel: its name, and its executions per run of the program."""

  name: str
  executions: int


@dataclasses.dataclass(frozen=True)
class Program:
  """The operations of a compiled program.

  Attributes:
    collectives: collectives within a slice, each once, in text order.
    between_slices: transfers handed to the runtime; `bytes` is what one device
      sends each time, and `groups` lists the devices of the slices.
    kernels: Pallas kernels, ordered by name.
    unknown_loops: number of loops of unknown length, which count once.
  """

  collectives: tuple[Collective, ...]
  between_slices: tuple[Collective, ...]
  kernels: tuple[Kernel, ...]
  unknown_loops: int


class _Visit(NamedTuple):
  """A computation to visit, with its executions and enclosing loops."""

  computation: str
  executions: int
  loops: int


def read(text: str) -> Program:
  """Parses `compiled.as_text()`.

  Raises:
    ValueError: it has no entry computation.
  """
  bodies, entry = _computations(text)
  found: dict[tuple[str, int, str], Collective] = {}
  between: dict[int, Collective] = {}
  kernels: dict[str, int] = {}
  unknown = 0
  visits = [_Visit(entry, 1, 0)]
  while visits:
    here = visits.pop()
    for name, line in _operations(bodies[here.computation]):
      kind = _kind(line)
      if kind == "while":
        body, trips = _loop(bodies, line)
        unknown += trips is None
        visits.append(
          _Visit(body, here.executions * (trips or 1), here.loops + 1)
        )
        continue
      if kind == "custom-call":
        if 'custom_call_target="tpu_custom_call"' in line:
          kernel = name.rsplit(".", 1)[0]
          kernels[kernel] = kernels.get(kernel, 0) + here.executions
        continue
      if kind == "send" and (transfer := _BETWEEN.search(line)):
        one = _transfer(transfer, line, here)
        between[one.channel] = one
        continue
      base = kind.removesuffix("-start")
      if base in COLLECTIVES:
        one = _collective(base, line, here, len(found))
        key = base, one.channel, _collective_key(one, name, here)
        known = found.get(key)
        # Keep the occurrence with the fewest executions: the others overlap
        # with it, perhaps in a loop.
        if known is None or one.executions < known.executions:
          found[key] = one
        continue
      visits += [here._replace(computation=c) for c in _called(kind, line)]
  return Program(
    tuple(found.values()),
    tuple(between.values()),
    tuple(Kernel(*pair) for pair in sorted(kernels.items())),
    unknown,
  )


def num_bytes(shape: str) -> int:
  """Bytes of the arrays in a shape such as "(f32[2,3]{1,0}, bf16[4])"."""
  total = 0
  for dtype, sizes in _ARRAY.findall(shape):
    size = 1
    for n in filter(None, sizes.split(",")):
      size *= int(n)
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    total += size * bits // 8
  return total


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  bodies: dict[str, list[str]] = {}
  name = entry = None
  for line in text.splitlines():
    if not line.startswith(" "):
      opening = _OPENING.match(line)
      if opening:
        name = opening[2]
        entry = name if opening[1] else entry
        bodies[name] = []
    elif name:
      bodies[name].append(line)
  if entry is None:
    raise ValueError("the program has no entry")
  return bodies, entry


def _operations(lines: list[str]) -> Iterator[tuple[str, str]]:
  for line in lines:
    found = _OPERATION.match(line)
    if found:
      yield found[1], found[2]


def _kind(line: str) -> str:
  """The operation of "shape operation(operands), ..."."""
  found = _KIND.search(line)
  return found[1] if found else ""


def _called(kind: str, line: str) -> list[str]:
  """Computations that an operation runs, except scalar ones."""
  if kind == "conditional":
    names = []
    for listed, first, second in _BRANCHES.findall(line):
      names += [n.strip().lstrip("%") for n in listed.split(",") if n]
      names += [n for n in (first, second) if n]
    return names
  if kind in ("fusion", "call", "async-start"):
    return _CALLED.findall(line)
  return []


def _loop(bodies, line: str) -> tuple[str, int | None]:
  """The body of a loop, and its number of iterations if the text has it."""
  (body,) = re.findall(r"body=%?([\w.-]+)", line)
  (condition,) = re.findall(r"condition=%?([\w.-]+)", line)
  lines = "\n".join(bodies[condition])
  constants = {name: int(n) for name, n in _CONSTANT.findall(lines)}
  compared = _COMPARED.search(lines)
  if not compared or compared[2] != "LT":
    return body, None
  limit = compared[1].split(",")[-1].strip().split(" ")[-1].lstrip("%")
  return body, constants.get(limit)


def _collective_key(one: Collective, name: str, here: _Visit) -> str:
  """A key that separates collectives of the same kind and channel."""
  if one.kind == "reduce-scatter":  # one channel, separate computations
    return here.computation
  if one.kind == "collective-permute":  # occurs only once
    return name
  # All collectives of a `shard_map` have channel 1.
  return one.source if one.channel == _MANUAL else ""


def _results(shape: str) -> str:
  """The results of a start, which lists operands, results and counters."""
  arrays = [f"{a}[{b}]" for a, b in _ARRAY.findall(shape)]
  arrays = [a for a in arrays if a != "u32[]"]
  return " ".join(arrays[len(arrays) // 2 :])


def _collective(kind, line, here: _Visit, number: int) -> Collective:
  channel = _CHANNEL.search(line)
  shape = line[: line.index(f" {kind}")]
  # XLA writes a reduce-scatter as a fusion of an all-reduce and a slice.
  if here.computation.startswith("all-reduce-scatter"):
    kind = "reduce-scatter"
  started = f" {kind}-start(" in line and kind != "all-reduce"
  size = num_bytes(_results(shape) if started else shape)
  groups, source = _GROUPS.search(line), _NAMED.search(line)
  return Collective(
    kind,
    int(channel[1]) if channel else -1 - number,
    size,
    here.executions,
    here.loops,
    shape,
    groups[1] if groups else "",
    source[1] if source else "",
  )


def _transfer(found: re.Match, line: str, here: _Visit) -> Collective:
  channel, source = _CHANNEL.search(line), _NAMED.search(line)
  sent = _ARRAY.search(line)
  assert channel and sent, line
  return Collective(
    found[2].lower().replace("_", "-"),
    int(channel[1]),
    num_bytes(sent[0]),
    here.executions,
    here.loops,
    sent[0],
    found[1],
    source[1] if source else "",
  )
