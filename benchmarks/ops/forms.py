"""Times a memory's forms against its token-by-token reference, in one run.

  python benchmarks/ops/forms.py
  python benchmarks/ops/forms.py --time=8192 --chunk_sizes=32,64 --json=FILE

Forward, forward+backward (gradients of all inputs and the initial state) and
backward over forward; medians of several runs after a warm-up, forms taken in
turn so that a drifting machine hits all alike. Ratios are what counts.
"""

import dataclasses
import functools
import json
import platform
import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from memcomp_kernels.testing import memories

_MEMORY = flags.DEFINE_enum(
  "memory", "trellis", list(memories.MEMORIES), "Which memory."
)
_BATCH = flags.DEFINE_integer("batch", 1, "Rows.")
_TIME = flags.DEFINE_integer("time", 2048, "Tokens a row.")
_HEADS = flags.DEFINE_integer("heads", 12, "Heads.")
_DIM = flags.DEFINE_integer("dim", 64, "Key and value width, and slots.")
_CHUNKS = flags.DEFINE_list("chunk_sizes", ["16", "32", "64"], "Chunk sizes.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Timed runs of each.")
_JSON = flags.DEFINE_string("json", None, "Also write the rows here.")


def functions(memory, spec, implementation):
  """Returns (forward, forward+backward) of one form, and its arguments."""
  sizes = {
    "batch": _BATCH.value,
    "heads": _HEADS.value,
    "key_dim": _DIM.value,
    "value_dim": _DIM.value,
  }
  inputs = memory.make_inputs(
    jax.random.key(0), spec, time=_TIME.value, **sizes
  )
  state = memory.make_state(jax.random.key(1), spec, **sizes)
  state = jax.tree.map(
    lambda x: x.astype(jnp.float32) if x.dtype.kind == "f" else x, state
  )
  chunk = functools.partial(
    memory.op.chunk, spec=spec, implementation=implementation
  )

  def loss(floats, rest, inputs):
    merged = jax.tree.map(
      lambda f, r: r if f is None else f,
      floats,
      rest,
      is_leaf=lambda x: x is None,
    )
    return jnp.mean(jnp.square(chunk(merged, inputs)[1]))

  floats = jax.tree.map(lambda x: x if x.dtype.kind == "f" else None, state)
  forward = jax.jit(lambda *a: chunk(*a)[1])
  both = jax.jit(jax.grad(loss, argnums=(0, 2)))
  return (
    functools.partial(forward, state, inputs),
    functools.partial(both, floats, state, inputs),
  )


def seconds(function) -> float:
  """One timed call, after one of its own that is not.

  Without it a form pays for giving back what the one before it had allocated.
  """
  jax.block_until_ready(function())
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def main(_):
  """Times, prints the table, writes JSON."""
  memory = memories.MEMORIES[_MEMORY.value]
  base = next(iter(memory.specs.values()))
  cases = {}
  for chunk in map(int, _CHUNKS.value):
    spec = dataclasses.replace(base, num_slots=_DIM.value, chunk_size=chunk)
    for name in memory.op.implementations.functions:
      if name == "reference" and chunk != int(_CHUNKS.value[0]):
        continue  # its time does not depend on the chunk size
      label = name if name == "reference" else f"{name}, chunk {chunk}"
      cases[label] = functions(memory, spec, name)
  for pair in cases.values():
    for function in pair:
      seconds(function)
  times = {label: ([], []) for label in cases}
  for _ in range(_REPEATS.value):
    for label, pair in cases.items():
      for kept, function in zip(times[label], pair, strict=True):
        kept.append(seconds(function))

  medians = {
    label: tuple(map(statistics.median, kept)) for label, kept in times.items()
  }
  device = jax.devices()[0].device_kind
  print(
    f"{memory.name}: batch {_BATCH.value}, time {_TIME.value}, heads"
    f" {_HEADS.value}, {_DIM.value} x {_DIM.value}, float32, {device}, jax"
    f" {jax.__version__}, median of {_REPEATS.value}\n"
  )
  print(
    "| form | forward ms | forward+backward ms | of reference | bwd / fwd |"
  )
  print("|---|---|---|---|---|")
  rows = []
  for label, (forward, both) in medians.items():
    row = {
      "form": label,
      "forward_ms": forward * 1e3,
      "forward_backward_ms": both * 1e3,
      "speedup": medians["reference"][1] / both,
      "backward_over_forward": (both - forward) / forward,
    }
    rows.append(row)
    print(
      f"| {label} | {row['forward_ms']:.1f} |"
      f" {row['forward_backward_ms']:.1f} | {row['speedup']:.1f}x |"
      f" {row['backward_over_forward']:.1f} |"
    )
  if _JSON.value:
    record = {
      "memory": memory.name,
      "device": device,
      "platform": platform.platform(),
      "jax": jax.__version__,
      "rows": rows,
    }
    with open(_JSON.value, "w") as file:
      json.dump(record, file, indent=2)


if __name__ == "__main__":
  app.run(main)
