"""Compiles a training step for TPUs that need not be attached."""

import contextlib
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

from memcomp import config as config_lib
from memcomp import disk, errors, integrity, sharding
from memcomp.compiling import chips, flops, program, report
from memcomp.models import abstract
from memcomp.training import feed, step, validate
from memcomp.training import flops as model_flops
from memcomp.training import state as state_lib

_LARGEST = 10


def run(
  config: config_lib.Config,
  topology: str,
  workdir: str | pathlib.Path,
  slices: int = 1,
) -> int:
  """Compiles the training step of a config and reports its resources.

  Mesh, state and step are those of training. It reads no data and no tokenizer,
  and executes nothing. It writes the report as JSON to
  `<workdir>/compile_only/<topology>.json`, or for several slices to
  `<slices>x<topology>.json`.

  Args:
    config: config of the experiment.
    topology: TPU topology, for example "v5e:16x16".
    workdir: folder of the run.
    slices: number of slices, connected by a network, >= 1.

  Returns:
    0, or `errors.EXIT_DOES_NOT_FIT`.

  Raises:
    UserError: bad config or topology, or sizes that do not fit the mesh.
  """
  validate.check(config)
  devices = chips.devices(topology, slices)
  mesh = sharding.make_mesh(config.mesh, devices)
  validate.check_mesh(config, mesh)
  start = time.perf_counter()
  name = f"{slices}x{topology}" if slices > 1 else topology
  print(f"tracing {config.name} for {name}", flush=True)
  with jax.set_mesh(mesh):
    state = state_lib.abstract_state(config, mesh)
    batch = feed.abstract_batch(config, mesh)
    traced = step.jitted(config, mesh).trace(state, batch)
    lowered = traced.lower()
    traced_at = time.perf_counter()
    print("compiling: minutes for a large model", flush=True)
    try:
      with _without_cache_writes():
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      if "Ran out of memory" not in str(error):
        raise
      return _does_not_fit(_needs(str(error)), traced.jaxpr, mesh)
  seconds = {
    "trace": round(traced_at - start, 1),
    "compile": round(time.perf_counter() - traced_at, 1),
  }
  found: dict[str, Any] = {
    "name": config.name,
    "topology": topology,
    "slices": slices,
    "seconds": seconds,
    **_facts(config, mesh, traced.jaxpr, compiled),
  }
  path = pathlib.Path(workdir) / "compile_only" / f"{_file(name)}.json"
  with disk.clear_errors(f"cannot write {path}"):
    path.parent.mkdir(parents=True, exist_ok=True)
    integrity.replace_text(path, json.dumps(found, indent=2) + "\n")
  print(report.text(found))
  print(f"saved {path}")
  memory = found["memory_per_device"]
  if memory["available"] and memory["total"] > memory["available"]:
    needed, there = (memory[x] / 2**30 for x in ("total", "available"))
    needs = f"needs {needed:.2f}GiB, has {there:.2f}GiB"
    return _does_not_fit(needs, traced.jaxpr, mesh)
  return 0


def _facts(config, mesh, jaxpr, compiled) -> dict[str, Any]:
  """Returns the facts about a compiled step."""
  device = mesh.devices.flat[0]
  memory = compiled.memory_analysis()
  read = program.read(compiled.as_text())
  length = config.data.sequence_length
  tokens = config.training.batch_size * length
  model = abstract.model_of(config.model)
  per_token = model_flops.per_token(config.model, model, length)
  counted = flops.count(jaxpr)
  # Donated results share the buffers of the arguments.
  total = (
    memory.argument_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.generated_code_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
  )
  return {
    "devices": mesh.size,
    "device_kind": device.device_kind,
    "mesh": dict(mesh.shape),
    "rows": config.training.batch_size,
    "sequence_length": length,
    "memory_per_device": {
      "arguments": memory.argument_size_in_bytes,
      "temporaries": memory.temp_size_in_bytes,
      "code": memory.generated_code_size_in_bytes,
      "total": total,
      "available": chips.hbm_bytes(device),
    },
    "flops": {
      "program": counted,
      "model": per_token * tokens,
      "ratio": round(counted / (per_token * tokens), 3),
    },
    "kernels": {k.name: k.executions for k in read.kernels},
    "collectives": report.collectives(read.collectives),
    "largest": report.largest(read.collectives),
    "between_slices": report.collectives(read.between_slices),
    "largest_between_slices": report.largest(read.between_slices),
    "unknown_loops": read.unknown_loops,
    "versions": {"jax": jax.__version__},
  }


@contextlib.contextmanager
def _without_cache_writes() -> Iterator[None]:
  """Disables writes to the compilation cache.

  Programs for TPUs that are not attached can be written, but not read back.
  """
  name = "jax_persistent_cache_min_compile_time_secs"
  before = getattr(jax.config, name)
  jax.config.update(name, math.inf)
  try:
    yield
  finally:
    jax.config.update(name, before)


def _needs(message: str) -> str:
  """The memory that the compiler says a device needs."""
  asked = re.search(
    r"\(([\d.]+[KMGT])\) exceeds available HBM \(([^)]*)\)", message
  )
  return f"needs {asked[1]}iB, has {asked[2]}iB" if asked else message


def _does_not_fit(needs: str, jaxpr: Any, mesh: jax.sharding.Mesh) -> int:
  """Reports what is too large for the device."""
  print(
    f"error: the step does not fit: a device {needs}. Largest arrays of the"
    " program, GiB of each device if spread evenly:",
    file=sys.stderr,
  )
  for size, shape in largest_arrays(jaxpr, mesh.size):
    print(f"  {size / 2**30:.2f} {shape}", file=sys.stderr)
  print(
    "lower training.batch_size, training.loss_chunk or data.sequence_length,"
    " raise training.accumulation or mesh.fsdp, or set model.remat=block",
    file=sys.stderr,
  )
  return errors.EXIT_DOES_NOT_FIT


def largest_arrays(jaxpr: Any, devices: int) -> list[tuple[float, str]]:
  """Bytes per device, and shapes, of the largest computed arrays.

  Args:
    jaxpr: the traced program.
    devices: number of devices that share each array; arrays in a `shard_map`
      are per device already.
  """
  found: dict[str, float] = {}

  def visit(jaxpr, share):
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
      if equation.primitive.name == "pallas_call":
        continue  # its blocks are in on-chip memory
      for variable in equation.outvars:
        aval = variable.aval
        if hasattr(aval, "dtype") and hasattr(aval, "shape"):
          size = math.prod(aval.shape) * aval.dtype.itemsize / share
          found[f"{aval.dtype}{list(aval.shape)}"] = size
      inner = 1 if equation.primitive.name == "shard_map" else share
      for x in jax.tree.leaves(list(equation.params.values())):
        if hasattr(getattr(x, "jaxpr", x), "eqns"):
          visit(x, inner)

  visit(jaxpr, devices)
  ordered = sorted(found.items(), key=lambda item: -item[1])
  return [(size, shape) for shape, size in ordered[:_LARGEST]]


def _file(name: str) -> str:
  return re.sub(r"[^\w.-]+", "_", name)
