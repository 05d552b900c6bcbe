"""Small Lattices for `test_lattice_definition` and `test_lattice_columns`."""

import jax
import jax.numpy as jnp
import programs

from memcomp_kernels import lattice
from memcomp_kernels.testing import memories

COMPILED = programs.of(lattice)
MEMORY = memories.MEMORIES["lattice"]
SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 7}


def state_of(spec, *rows):
  """A state of one head whose memory has these rows."""
  return lattice.init_state(
    spec,
    batch=1,
    heads=1,
    value_dim=len(rows),
    dtype=jnp.float64,
    memory=jnp.array([rows], jnp.float64),
  )


def two_slots(**fields):
  return lattice.Spec(num_slots=2, **{"gradient_at": "token"} | fields)


def inputs_for(spec, time=12, **sizes):
  return MEMORY.make_inputs(jax.random.key(0), spec, time=time, **SIZES | sizes)


def run(spec, inputs, **sizes):
  state = MEMORY.make_state(jax.random.key(1), spec, **SIZES | sizes)
  return COMPILED.reference(state, inputs, spec=spec)
