"""Times ways to evaluate gradients per token, on random and on real inputs.

  python benchmarks/ops/exact.py --memory=trellis --time=2048
  python benchmarks/ops/exact.py --memory=lattice --time=8192 --json=FILE

The token scan, the stale chunk form and every way to solve a tile, forward and
forward+backward (gradients of all inputs and the initial state), one after the
other in every round so that a drifting machine hits all alike. "Real" inputs
are those of the last layer of a byte model trained for some updates on the
default corpus: text repeats its keys. Errors are relative RMS, against the
float64 token scan: of the outputs, and the worst of all gradients.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import runpy
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.data import sources, tokenizer
from memcomp.evaluation import activations
from memcomp.layers import registry
from memcomp.models import abstract
from memcomp.training import feed as feed_lib
from memcomp.training import state as state_lib
from memcomp.training import step as step_lib
from memcomp_kernels import contract, dispatch
from memcomp_kernels.lattice import tilings as lattice_tilings
from memcomp_kernels.math import solver
from memcomp_kernels.testing import errors, memories
from memcomp_kernels.trellis import tilings as trellis_tilings

_MEMORY = flags.DEFINE_enum("memory", "trellis", ["trellis", "lattice"], "")
_TIME = flags.DEFINE_integer("time", 2048, "Tokens of one row.")
_HEADS = flags.DEFINE_integer("heads", 12, "Heads of 64 x 64.")
_UPDATES = flags.DEFINE_integer("updates", 150, "Of the byte model.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each.")
_DATA = flags.DEFINE_list("data", ["random", "real"], "Kinds of inputs.")
_WAYS = flags.DEFINE_list("ways", None, "Only those with these in their name.")
_JSON = flags.DEFINE_string("json", None, "Also write the rows here.")

_DIM = 64
_QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"


class Way(NamedTuple):
  """One row of the table.

  Attributes:
    spec: stale ones mean something else.
    run: (state, inputs) -> (state, outputs).
    depth: activations that wait for each other, per token; "" if it depends.
    activations: evaluated per token.
  """

  spec: Any
  run: Callable
  depth: str
  activations: str


def ways(name: str) -> dict[str, Way]:
  """All ways that the memory has."""
  memory = memories.MEMORIES[name]
  base = dataclasses.replace(
    next(iter(memory.specs.values())), num_slots=_DIM, gradient_at="token"
  )
  chunk = functools.partial(memory.op.chunk, implementation="xla_chunked")

  def scan(state, inputs):
    call = dispatch.Call(state, inputs, base)
    return contract.scan(memory.op.step, call, block=32)

  found = {"token scan, checkpointed": Way(base, scan, "1", "1")}
  if _TIME.value <= 2048:  # it keeps the memory of every token
    plain = functools.partial(memory.op.reference, spec=base)
    found["token scan"] = Way(base, plain, "1", "1")
  for size in (16, 32, 64):
    stale = dataclasses.replace(
      base, gradient_at="chunk_start", chunk_size=size
    )
    run = functools.partial(chunk, spec=stale)
    found[f"stale, chunk {size}"] = Way(stale, run, f"1/{size}", "1")
  for label, (tiling, depth, evaluated) in _tilings(name).items():
    run = functools.partial(chunk, spec=base, tiling=tiling)
    found[label] = Way(base, run, depth, evaluated)
  wanted = _WAYS.value
  return {
    label: way
    for label, way in found.items()
    if not wanted or any(part in label for part in wanted)
  }


def _tilings(name):
  """Label -> (tiling, depth, activations) of exact ways."""
  found = {}
  if name == "lattice":
    Tiling = lattice_tilings.Tiling
    for size in (8, 16, 32):
      found[f"substitution, tile {size}"] = Tiling(tile_time=size), "1", "1"
    swept = Tiling(tile_time=16, solver="sweeps")
    return found | {"sweeps, tile 16": (swept, "sweeps/16", "sweeps")}
  Tiling, Solver = trellis_tilings.Tiling, solver.Solver
  for size in (16, 32, 64):
    found[f"substitution, tile {size}"] = Tiling(tile_time=size), "1", "1"
  for size, block in ((32, 8), (64, 16)):
    blocks = Tiling(tile_time=size, solver=Solver(block_time=block))
    label = f"substitution, tile {size}, blocks of {block}"
    found[label] = blocks, "1", "1"
  nested = Solver(method="sweeps", block_time=4, tolerance=0)
  found["nested: 3 sweeps in blocks of 4, tile 32"] = (
    Tiling(tile_time=32, solver=nested),
    "1",
    "4",
  )
  swept = Solver(method="sweeps", max_sweeps=16)
  found["sweeps to 1e-6, tile 16"] = (
    Tiling(tile_time=16, solver=swept),
    "sweeps/16",
    "sweeps",
  )
  return found


def random_case(name: str) -> tuple[Any, Any]:
  """State and inputs of random numbers."""
  memory = memories.MEMORIES[name]
  spec = dataclasses.replace(
    next(iter(memory.specs.values())), num_slots=_DIM, gradient_at="token"
  )
  sizes = {
    "batch": 1,
    "heads": _HEADS.value,
    "key_dim": _DIM,
    "value_dim": _DIM,
  }
  inputs = memory.make_inputs(
    jax.random.key(0), spec, time=_TIME.value, **sizes
  )
  return memory.make_state(jax.random.key(1), spec, **sizes), inputs


def real_case(name: str) -> tuple[Any, Any]:
  """State and inputs of a byte model's last layer, on validation bytes."""
  config: config_lib.Config = runpy.run_path(str(_QUICKSTART))["get_config"]()
  config.model.mixers["memory"] = registry.config_of(name)(
    heads=_HEADS.value, num_slots=_DIM, value_dim=_DIM, gradient_at="token"
  )
  config.optimizer.name = "adamw"  # these inputs are of few, fresh updates
  config.training.state_passing = 0.0
  config.training.steps = _UPDATES.value
  config.optimizer.warmup_steps = max(_UPDATES.value // 20, 1)
  mesh = sharding.make_mesh(config.mesh)
  bytes_ = tokenizer.load(config.data.tokenizer)
  store = sources.open_split(config.data, "train", tokenizer=bytes_)
  rows = config.training.batch_size
  with jax.set_mesh(mesh):
    state = state_lib.initial_state(config, mesh)
    update = jax.jit(step_lib.make_train_step(config))
    with feed_lib.Feed(config, store, mesh, rows=rows, shuffle=True) as feed:
      for batch, _ in itertools.islice(feed, _UPDATES.value):
        state, metrics = update(state, batch)
    logging.info("byte model: loss %.3f nats a byte", metrics["loss"])
    graphdef = abstract.model_of(config.model).graphdef
    model = abstract.merge(graphdef, state.params)
    unseen = sources.open_split(config.data, "validation", tokenizer=bytes_)
    tokens = [unseen.read(i, 0, int(n)) for i, n in enumerate(unseen.lengths)]
    tokens = np.concatenate(tokens)[None, : _TIME.value].astype(np.int32)
    found = activations.memory_inputs(model, jnp.asarray(tokens))[-1]
  return jax.device_get(found)


def functions(way: Way, state, inputs):
  """Returns (forward, forward+backward) as calls without arguments."""
  state = _as_made_by(way.spec, state)
  floats = jax.tree.map(lambda x: x if x.dtype.kind == "f" else None, state)

  def loss(floats, inputs):
    merged = jax.tree.map(
      lambda f, s: s if f is None else f,
      floats,
      state,
      is_leaf=lambda x: x is None,
    )
    y = way.run(merged, inputs)[1]
    return jnp.mean(jnp.square(y)), y

  forward = jax.jit(lambda *x: loss(*x)[1])
  both = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
  return (
    functools.partial(forward, floats, inputs),
    functools.partial(both, floats, inputs),
  )


def _as_made_by(spec, state):
  """The same memory, with what stale gradients also keep."""
  if not spec.chunked:
    return state
  starts = {
    f"{field}_start": getattr(state, field)
    for field in state._fields
    if f"{field}_start" in state._fields
  }
  position = jnp.zeros(state.segment_id.shape, jnp.int32)
  return state._replace(**starts, position=position)


def truth(name: str, state, inputs):
  """Outputs and gradients of the token scan in float64."""
  way = ways(name)["token scan, checkpointed"]
  with jax.enable_x64(True):

    def wide(x):
      return np.asarray(x, np.float64) if x.dtype.kind == "f" else x

    state, inputs = jax.tree.map(wide, (state, inputs))
    return jax.device_get(functions(way, state, inputs)[1]())


def seconds(function) -> float:
  """One timed call, after one that is not."""
  jax.block_until_ready(function())
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def measure(name: str, data: str) -> list[dict[str, Any]]:
  """One row a way."""
  state, inputs = (random_case if data == "random" else real_case)(name)

  def narrow(x):
    return jnp.asarray(x, jnp.float32) if x.dtype.kind == "f" else x

  state, inputs = jax.tree.map(narrow, (state, inputs))
  true_gradients, true_y = truth(name, state, inputs)
  true = jax.tree.leaves(true_gradients)
  cases, rows = {}, []
  for label, way in ways(name).items():
    pair = cases[label] = functions(way, state, inputs)
    gradients, y = jax.device_get(pair[1]())
    row = {
      "data": data,
      "way": label,
      "depth": way.depth,
      "activations": way.activations,
      "error": float(errors.relative_rms(y, true_y)),
    }
    if not way.spec.chunked:
      found = jax.tree.leaves(gradients)
      pairs = zip(found, true, strict=True)
      row["gradient_error"] = max(
        float(errors.relative_rms(a, b)) for a, b in pairs
      )
    rows.append(row)
    logging.info("%s, %s: error %.1e", data, label, row["error"])
  times = {label: ([], []) for label in cases}
  for _ in range(_REPEATS.value):
    for label, pair in cases.items():
      for kept, function in zip(times[label], pair, strict=True):
        kept.append(seconds(function))
  for row in rows:
    forward, both = (statistics.median(x) for x in times[row["way"]])
    row |= {"forward_ms": forward * 1e3, "forward_backward_ms": both * 1e3}
  return rows


def table(rows: list[dict[str, Any]]) -> str:
  """Markdown."""
  by_way = {row["way"]: row["forward_backward_ms"] for row in rows}
  scan = min(by_way[w] for w in by_way if w.startswith("token scan"))
  stale = [by_way[w] for w in by_way if w.startswith("stale")]
  lines = [
    "| way | depth | activations | forward ms | forward+backward ms | scan /"
    " this | this / best stale | error | worst gradient error |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    both = row["forward_backward_ms"]
    gradient = row.get("gradient_error")
    lines.append(
      f"| {row['way']} | {row['depth']} | {row['activations']} |"
      f" {row['forward_ms']:.0f} | {both:.0f} | {scan / both:.1f} |"
      f" {both / min(stale):.2f} | {row['error']:.0e} |"
      f" {'' if gradient is None else f'{gradient:.0e}'} |"
    )
  return "\n".join(lines)


def main(_):
  """Prints a table for each kind of data, writes JSON."""
  record = {
    "memory": _MEMORY.value,
    "time": _TIME.value,
    "heads": _HEADS.value,
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "rows": [],
  }
  for data in _DATA.value:
    rows = measure(_MEMORY.value, data)
    record["rows"] += rows
    print(
      f"\n{_MEMORY.value}, {data} inputs: batch 1, time {_TIME.value}, heads"
      f" {_HEADS.value}, {_DIM} x {_DIM}, float32, {record['device']}, jax"
      f" {jax.__version__}, median of {_REPEATS.value}\n\n{table(rows)}",
      flush=True,
    )
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
  app.run(main)
