"""Counts a TPU kernel's static cycles, without a TPU; needs the extra `aot`.

  python benchmarks/tpu_static.py --memory=trellis --topology=v5e:2x2
  python benchmarks/tpu_static.py --topology=v5e:2x2,v6e:2x2 --json=FILE
  python benchmarks/tpu_static.py --baseline=benchmarks/tpu_static.json

One row for each kernel, shape and topology: cycles (with stalls) and bundles
of a grid step over its tokens and heads, the share of the matrix unit's and
the vector unit's slots in use, registers spilled, bytes to and from main
memory over the least (each input read once, each output written once), on-chip
memory, and the output's relative RMS error against float32. The XLA form of
the same function stands beside it, by the compiler's own estimates.
--memory=lattice counts its kernel alone, key_value_means one tile; --around
says what stands around kernels (preparing tiles, layouts), by those estimates.

Everything here is static: what the compiler scheduled. Waiting for memory is
not in it, nothing ran on a TPU, and nothing is a claim about time.

With --baseline, counts the kernels of that file again (of --topology alone,
where that is given), and fails where cycles have grown by more than 5 %;
--update writes the flags' rows to it instead.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tpu_cases
import tpu_schedule
from absl import app, flags, logging
from tpu_cases import Case

from memcomp_kernels import aot
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.key_value_means import tile as key_value_means_tile
from memcomp_kernels.key_value_means.pallas_tpu import (
  engine as key_value_means_tpu,
)
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.testing import errors

_MEMORY = flags.DEFINE_list(
  "memory", ["trellis"], f"Which of: {', '.join(tpu_cases.DECAYS)}."
)
_TOPOLOGY = flags.DEFINE_list("topology", ["v5e:2x2"], "Of one TPU each.")
_DIRECTION = flags.DEFINE_list(
  "direction",
  ["forward", "training", "backward"],
  "Training is forward as it is for a gradient: it saves memories.",
)
_HEAD_DIM = flags.DEFINE_list("head_dim", ["64", "128"], "Keys and values.")
_CHUNK = flags.DEFINE_list("chunk", ["64", "128"], "Tokens a chunk.")
_DECAY = flags.DEFINE_list("decay", ["separable", "safe"], "Forms of decay.")
_XLA = flags.DEFINE_bool("xla", True, "Count the XLA form as well.")
_AROUND = flags.DEFINE_bool(
  "around", False, "Count what stands around the kernels, in place of them."
)
_ERROR = flags.DEFINE_bool("error", True, "Measure errors, interpreted.")
_JSON = flags.DEFINE_string("json", None, "Also write the rows here.")
_BASELINE = flags.DEFINE_string("baseline", None, "Compare with these rows.")
_UPDATE = flags.DEFINE_bool("update", False, "Write the baseline instead.")

_GROWTH = 1.05  # of cycles, before a comparison fails


def functions(case: Case, engine: form_lib.Engine):
  """The forward and the backward pass of whole chunks."""
  form = case.form(engine)

  def layout(operands):
    batch, time = jax.tree.leaves(operands.inputs)[0].shape[:2]
    return layout_lib.Layout(batch, time, case.chunk)

  def forward(operands):
    save = case.direction != "forward"
    return engine.forward(form, layout(operands), operands, save)

  def backward(operands, saved, cotangents):
    laid = layout(operands)
    return engine.backward(form, laid, operands, saved, cotangents)

  return forward, backward


def arguments(case: Case, engine: form_lib.Engine):
  """Shapes of the arguments of the case's direction."""
  forward, _ = functions(case, engine)
  operands = jax.eval_shape(case.operands)
  result, saved = jax.eval_shape(forward, operands)
  result = result._replace(stats=None)
  if case.direction != "backward":
    return (operands,)
  return operands, saved, result


def whole_pass(case: Case, *, xla: bool = False) -> tuple[Callable, tuple]:
  """A case's pass, by its kernels or by the XLA form, and its arguments."""
  if case.memory == "key_value_means":
    run = key_value_means_tile.run if xla else key_value_means_tpu.ENGINE
    return tpu_cases.key_value_means_tile(case, run)
  engine = form_lib.ENGINE if xla else case.engine
  function = functions(case, engine)[case.direction == "backward"]
  return function, arguments(case, engine)


def count_kernel(case: Case, folder: pathlib.Path) -> dict:
  """The row of a kernel."""
  whole, given = whole_pass(case)
  function, own = tpu_cases.kernel_alone(case) or (whole, given)
  with launch.compiled():
    traced = jax.make_jaxpr(function)(*own)
    aot.compile_for(case.topology, function, *own)
    results = jax.eval_shape(whole, *given)
  found = tpu_schedule.schedule(folder, case.kernel, case.trips)
  call = tpu_schedule.kernel_call(traced)
  steps = math.prod(call.params["grid_mapping"].grid)
  tokens = _tokens(case) / steps
  least = tpu_schedule.num_bytes(necessary(case, given, results))
  return {
    "cycles_per_token_head": round(found.cycles / tokens, 3),
    "bundles_per_token_head": round(found.bundles / tokens, 3),
    "utilisation": found.utilisation,
    "spills": round(found.spills / tokens, 3),
    "hbm_bytes_ratio": round(tpu_schedule.moved_bytes(call) / least, 3),
    "vmem_bytes": tpu_schedule.vmem_bytes(call),
    "bundles": found.bundles,
  }


def count_around(case: Case) -> dict:
  """The row of what stands around a kernel: preparing, layouts."""
  with launch.compiled():
    compiled = aot.compile_for(case.topology, *_flat(whole_pass(case)))
  cycles = tpu_schedule.estimated_cycles(compiled.as_text(), 1)
  return {"cycles_per_token_head": round(cycles / _tokens(case), 3)}


def _flat(call: tuple) -> tuple:
  function, given = call
  return function, *given


def _tokens(case: Case) -> int:
  """Tokens of all heads in a call."""
  return case.batch * case.time * tpu_cases.HEADS.value


def necessary(case: Case, given: tuple, results: Any) -> tuple:
  """What a pass must read and write."""
  if case.memory == "key_value_means":
    return given, results
  operands, *rest = given
  if case.direction != "backward":
    result, saved = results
    read = operands.memories, operands.inputs
    return read, (result.memories, result.outputs, saved)
  saved, cotangents = rest
  read = operands.inputs, saved, cotangents.outputs, cotangents.memories
  return read, (results.memories, results.inputs)


def count_xla(case: Case) -> dict:
  """The row of the XLA form."""
  compiled = aot.compile_for(case.topology, *_flat(whole_pass(case, xla=True)))
  cycles = tpu_schedule.estimated_cycles(
    compiled.as_text(), *tpu_cases.trips_of_xla(case)
  )
  return {"cycles_per_token_head": round(cycles / _tokens(case), 3)}


def error(case: Case) -> float:
  """Relative RMS of what the interpreted kernel computes, against float32.

  Of the outputs forward, of the worst gradient of an input backward.
  """
  if case.memory == "key_value_means":
    return _error_of_tile(case)
  heads = max(1, 128 // min(case.head_dim, case.chunk))
  if case.memory == "state_space_duality":
    heads = None  # as many as share a key
  size = {"batch": 1, "time": 2 * case.chunk, "heads": heads}
  given = case.operands(**size)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), given)

  def run(engine, operands):
    forward, backward = functions(case, engine)
    result, saved = forward(operands)
    result = result._replace(stats=None)
    if case.direction != "backward":
      return result.outputs
    keys = iter(jax.random.split(jax.random.key(3), 8))
    cotangents = jax.tree.map(
      lambda x: jax.random.normal(next(keys), x.shape).astype(x.dtype), result
    )
    # Of whole chunks: nothing reads where the last one started.
    unread = jax.tree.map(jnp.zeros_like, cotangents.chunk_start)
    cotangents = cotangents._replace(chunk_start=unread)
    return backward(operands, saved, cotangents).inputs

  truth = jax.jit(lambda x: run(form_lib.ENGINE, x))(wide)
  with launch.interpreted():
    ours = jax.jit(lambda x: run(case.engine, x))(given)
  pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True)
  return float(max(errors.relative_rms(a, b) for a, b in pairs))


def _error_of_tile(case: Case) -> float:
  """As `error`, of Key-Value Means: of a state's first tile."""
  function, given = whole_pass(case)
  keys = iter(jax.random.split(jax.random.key(3), 64))

  def draw(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return jnp.ones(x.shape, x.dtype)
    return jax.random.normal(next(keys), x.shape).astype(x.dtype)

  state, inputs, present = given
  state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
  inputs = jax.tree.map(draw, inputs)
  given = state, inputs, jnp.ones(present.shape, bool)
  wide = jax.tree.map(
    lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, given
  )
  truth = jax.jit(whole_pass(case, xla=True)[0])(*wide)[1]
  with launch.interpreted():
    return float(errors.relative_rms(jax.jit(function)(*given)[1], truth))


def cases(baseline: list[dict]) -> list[Case]:
  """What the baseline holds, or else what the flags ask for."""
  if baseline:
    names = [field.name for field in dataclasses.fields(Case)]
    return [
      Case(**{name: row[name] for name in names})
      for row in baseline
      if (not _TOPOLOGY.present or row["topology"] in _TOPOLOGY.value)
      and (not _MEMORY.present or row["memory"] in _MEMORY.value)
    ]
  return [
    Case(memory, topology, direction, int(head_dim), int(chunk), decay)
    for memory in _MEMORY.value
    for topology in _TOPOLOGY.value
    for direction in _DIRECTION.value
    for head_dim in _HEAD_DIM.value
    for chunk in _CHUNK.value
    for decay in _DECAY.value
    if decay in tpu_cases.DECAYS[memory]
    and (memory, direction) not in tpu_cases.LEFT_OUT
  ]


def identity(row: dict) -> tuple:
  """What a row is about."""
  return tuple(
    row[name]
    for name in (
      "memory",
      "form",
      "topology",
      "direction",
      "head_dim",
      "slots",
      "chunk",
      "decay",
    )
  )


def grown(rows: list[dict], baseline: list[dict]) -> list[str]:
  """Lines on kernels that need more cycles than they did."""
  before = {identity(row): row["cycles_per_token_head"] for row in baseline}
  lines = []
  for row in rows:
    old = before.get(identity(row))
    new = row["cycles_per_token_head"]
    if row["form"] == "kernel" and old is not None and new > _GROWTH * old:
      lines.append(f"{' '.join(map(str, identity(row)))}: {old} -> {new}")
  return lines


def table(rows: list[dict]) -> str:
  """The rows for people."""
  lines = [
    "| form | memory | topology | direction | head dim | chunk | decay |"
    " cycles | bundles | MXU | VALU | VSTORE | spills |"
    " bytes / least | error |",
    "|" + "---|" * 15,
  ]
  for row in rows:
    use = row.get("utilisation", {})
    cells = [
      row["form"],
      row["memory"],
      row["topology"],
      row["direction"],
      row["head_dim"],
      row["chunk"],
      row["decay"],
      f"{row['cycles_per_token_head']:.2f}",
      row.get("bundles_per_token_head", ""),
      *(use.get(unit, "") for unit in ("MXU", "VALU", "VSTORE")),
      row.get("spills", ""),
      row.get("hbm_bytes_ratio", ""),
      f"{row['error']:.1e}" if "error" in row else "",
    ]
    lines.append("| " + " | ".join(map(str, cells)) + " |")
  return "\n".join(lines)


def main(argv: list[str]) -> None:
  """Counts what the flags ask for."""
  del argv
  jax.config.update("jax_platforms", "cpu")  # nothing is run on a TPU
  if unknown := set(_MEMORY.value) - set(tpu_cases.DECAYS):
    sys.exit(
      f"--memory={','.join(unknown)} has no TPU kernels of ours; choose from"
      f" {', '.join(tpu_cases.DECAYS)}"
    )
  baseline = []
  if _BASELINE.value and not _UPDATE.value:
    baseline = json.loads(pathlib.Path(_BASELINE.value).read_text())
  rows = []
  # Dumps of all that is around a kernel take minutes.
  dumping = contextlib.nullcontext if _AROUND.value else tpu_schedule.dumping
  with dumping() as folder:
    for case in cases(baseline):
      about = {
        **dataclasses.asdict(case),
        "gradient_at": getattr(case.spec, "gradient_at", "token"),
        "slots": getattr(case.spec, "num_slots", None),
      }
      if _AROUND.value:
        rows.append({"form": "around"} | about | count_around(case))
        continue
      row = {"form": "kernel"} | about | count_kernel(case, folder)
      if _ERROR.value and not baseline:
        row["error"] = error(case)
      rows.append(row)
      if _XLA.value and case.decay == "safe" and not baseline:
        rows.append({"form": "xla"} | about | count_xla(case))
      logging.info("%s", rows[-1])
  print(table(rows))
  if _JSON.value:
    tpu_schedule.write_rows(_JSON.value, rows)
  if _BASELINE.value and _UPDATE.value:
    tpu_schedule.write_rows(_BASELINE.value, rows)
  if lines := grown(rows, baseline):
    sys.exit("cycles grew by more than 5 %:\n" + "\n".join(lines))


if __name__ == "__main__":
  app.run(main)
