"""Counts the files and functions of the project that one call of an op enters.

  python benchmarks/ops/crossed.py [--list]

A reader who follows a call has to open that many files. Calls are traced, not
run; kernels are lowered for a TPU v6e. What is only imported does not count,
nor does what makes kernels compile without a TPU.
"""

import argparse
import importlib
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

import memcomp_kernels
from memcomp_kernels import contract, dispatch
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.testing import memories

HOME = str(pathlib.Path(memcomp_kernels.__file__).parent) + "/"
SIZES = {"batch": 1, "heads": 2, "key_dim": 128, "value_dim": 128}
TIME = 128


def entered(function: Callable, *arguments) -> dict[str, set[str]]:
  """Returns the functions that a traced call enters, by file."""
  found: dict[str, set[str]] = {}

  def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(HOME):
      path = code.co_filename.removeprefix(HOME)
      found.setdefault(path, set()).add(code.co_qualname)

  with launch.compiled("v6e"):
    sys.setprofile(note)
    try:
      jax.eval_shape(function, *arguments)
    finally:
      sys.setprofile(None)
  return found


def chunk(
  name: str, implementation: str, packed: bool, dtype=jnp.bfloat16, **fields
) -> dict[str, set[str]]:
  """Returns what the `chunk` of a memory enters."""
  memory = memories.MEMORIES[name]
  function = memory.op.implementations.functions[implementation]
  if isinstance(function, dispatch.Kernel):
    importlib.import_module(function.module)
  spec = memory.op.Spec(**fields)
  inputs = memory.make_inputs(jax.random.key(0), spec, time=TIME, **SIZES)
  narrow = {
    n: getattr(inputs, n).astype(dtype) for n in ("query", "key", "value")
  }
  state = memory.make_state(jax.random.key(0), spec, **SIZES)
  packing = {}
  if packed:
    packing["segment_ids"] = jnp.ones((1, TIME), jnp.int32)
    packing["reset_state"] = contract.FRESH

  def call(state, inputs):
    return memory.op.chunk(
      state, inputs, spec=spec, implementation=implementation, **packing
    )

  return entered(call, state, inputs._replace(**narrow))


def one_line(packed: bool) -> dict[str, set[str]]:
  """Returns what `gated_delta_rule(q, k, v, g=, beta=)` enters."""
  x = jnp.zeros((1, TIME, 2, 128))
  ids = jnp.ones((1, TIME), jnp.int32) if packed else None

  def call(q, k, v, g, beta):
    return memcomp_kernels.gated_delta_rule(
      q, k, v, g=g, beta=beta, segment_ids=ids, implementation="xla_chunked"
    )

  return entered(call, x, x, x, x[..., 0], x[..., 0])


CALLS: dict[str, Callable[[bool], dict[str, set[str]]]] = {
  "delta rule, XLA": lambda packed: chunk("delta_rule", "xla_chunked", packed),
  "delta rule, XLA, in one line": one_line,
  "linear attention with decay, XLA": lambda packed: chunk(
    "linear_attention", "xla_chunked", packed, forget_gate=True
  ),
  "Trellis, TPU": lambda packed: chunk("trellis", "mosaic_tpu", packed),
  "Trellis by token, TPU": lambda packed: chunk(
    "trellis", "mosaic_tpu", packed, gradient_at="token"
  ),
  "Lattice, TPU": lambda packed: chunk(
    "lattice", "mosaic_tpu", packed, num_slots=128
  ),
  "Tensor Cache, TPU": lambda packed: chunk(
    "tensor_cache", "mosaic_tpu", packed, window_size=128
  ),
}


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--list", action="store_true", help="name the files")
  listed = parser.parse_args().list
  print("| call | files | functions | packed: files | functions |")
  print("|---|---:|---:|---:|---:|")
  for name, call in CALLS.items():
    found = [call(packed) for packed in (False, True)]
    cells = [f"{len(x)} | {sum(map(len, x.values()))}" for x in found]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if listed:
      for path, functions in found[0].items():
        print(f"    {path:45} {', '.join(sorted(functions))}")


if __name__ == "__main__":
  main()
