"""GPU kernels through XLA's, Mosaic's and NVIDIA's compilers, for an H100.

What the assembler cannot keep in registers is bounded by what it was when the
kernel was written: more is a change that somebody should look at.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

from memcomp_kernels.pallas_gpu import tile_kernel
from memcomp_kernels.testing import gradients, memories

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "benchmarks"))

import hopper

pytestmark = [
  pytest.mark.aot_gpu,
  pytest.mark.skipif(not hopper.available(), reason="needs the extra aot-gpu"),
]
TRELLIS = {"num_slots": 64, "chunk_size": 64}
# memory, Spec, key and value dims -> bytes a thread spilled by kernel; kernels
# that are not named spill nothing. Of jax 0.11.2 and 0.12.0, the one that spills
# more.
CASES = {
  "trellis": (
    TRELLIS,
    64,
    {"trellis_reads_backward": 32, "trellis_writes_backward": 128},
  ),
  "trellis-token": (
    {"num_slots": 64, "gradient_at": "token"},
    64,
    {
      "trellis_writes": 16,
      "trellis_reads_backward": 32,
      "trellis_writes_backward": 512,
    },
  ),
  "trellis-16": (  # four chunks a tile
    {"num_slots": 64},
    64,
    {
      "trellis_writes": 16,
      "trellis_reads_backward": 32,
      "trellis_writes_backward": 320,
    },
  ),
  "trellis-128": (
    TRELLIS,
    128,
    {
      "trellis_writes": 64,
      "trellis_reads_backward": 96,
      "trellis_writes_backward": 640,
    },
  ),
  "lattice": (
    {"num_slots": 64, "chunk_size": 64},
    64,
    {"lattice_forward": 256, "lattice_backward": 2080},
  ),
  "delta_rule": ({}, 64, {}),
  "delta_rule-128": ({}, 128, {}),
  "state_space_duality": ({}, 64, {}),
  "tensor_cache": ({"window_size": 128, "chunk_size": 64}, 64, {}),
}
TYPICAL = "trellis", "delta_rule"


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=[pytest.mark.slow] * (case not in TYPICAL))
    for case in CASES
  ],
)
def test_compiles(case):
  """Forward and backward, four rows of 1,024 tokens, of 16 heads."""
  memory = memories.MEMORIES[case.partition("-")[0]]
  options, dim, spills = CASES[case]
  spec = memory.op.Spec(**options)
  sizes = {"batch": 4, "heads": 16, "key_dim": dim, "value_dim": dim}

  def arguments():
    key = jax.random.key(0)
    inputs = memory.make_inputs(key, spec, time=1024, **sizes)
    state = memory.make_state(key, spec, **sizes)
    return state, gradients.cast_operands(inputs, "bfloat16")

  def loss(state, inputs):
    run = functools.partial(memory.op.chunk, implementation="mosaic_gpu")
    _, output = run(state, inputs, spec=spec)
    return jnp.sum(jnp.square(output.astype(jnp.float32)))

  with tile_kernel.lowered():
    kernels = hopper.compile_for(
      jax.grad(loss, argnums=1), *jax.eval_shape(arguments)
    )
  assert kernels  # of these sizes no other test has them
  for kernel in kernels:
    assert kernel.spilled <= spills.get(kernel.name, 0), kernel
    assert kernel.resident() >= 1, kernel
    if case == "trellis" and kernel.name.startswith("trellis_reads"):
      assert kernel.resident() >= 2, kernel
