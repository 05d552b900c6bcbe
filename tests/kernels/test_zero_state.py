"""A memory of zeros that the compiler knows gives the reference's numbers.

With all optimisations, and fresh memory filled with garbage: XLA on a CPU once
read from where nothing had been written.
"""

import os
import subprocess
import sys

import pytest
import rotation

PROGRAM = """
import json
import sys
import jax
from memcomp_kernels.testing import errors, memories

memory = memories.MEMORIES[sys.argv[1]]
spec = memory.op.Spec(**json.loads(sys.argv[2]))
sizes = {"batch": 64, "heads": 2, "key_dim": 32, "value_dim": 32}
inputs = memory.make_inputs(jax.random.key(0), spec, time=32, **sizes)

def run(function):
  # The state is made inside: its zeros are constants of the program.
  def of_inputs(inputs):
    made = memory.make_state(jax.random.key(1), spec, **sizes)
    state = jax.tree.map(jax.numpy.zeros_like, made)
    return function(state, inputs, spec=spec)[1]
  return jax.jit(of_inputs)(inputs)

errors.assert_close(run(memory.op.chunk), run(memory.op.reference), 1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "spec"),
  rotation.cases(
    [("slot_attention", '{"num_slots": 32}'), ("delta_rule", "{}")],
    [("delta_rule", "{}")],
  ),
)
def test_zero_state(name, spec):
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
  }
  environment["MALLOC_PERTURB_"] = "1"
  environment["PYTHONPATH"] = os.pathsep.join(sys.path)
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM, name, spec],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
