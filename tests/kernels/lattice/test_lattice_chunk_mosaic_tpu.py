"""Lattice's TPU kernel on the matrix unit, interpreted, against the XLA form.

Gradients at the chunk's start, normalised columns.
"""

import dataclasses

import interpreter
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import dispatch, lattice
from memcomp_kernels.lattice.pallas_tpu import engine
from memcomp_kernels.pallas_tpu import launch
from memcomp_kernels.testing import (
  errors,
  gradients,
  memories,
  tolerances,
)

LATTICE = memories.MEMORIES["lattice"]
SPEC = lattice.Spec(num_slots=16, chunk_size=16)
OPEN = 3
"""Tokens of a chunk under way."""


def arguments(spec, time, *, position=0, heads=2, dtype="float32", dim=16):
  """A state (inside a chunk if `position`), a fresh one, and inputs."""
  sizes = {"batch": 2, "heads": heads, "key_dim": dim, "value_dim": dim}
  inputs = LATTICE.make_inputs(jax.random.key(0), spec, time=time, **sizes)
  inputs = gradients.cast(inputs, jnp.float32)
  state, fresh = (
    LATTICE.make_state(jax.random.key(seed), spec, **sizes) for seed in (1, 2)
  )
  if position:
    before = jax.tree.map(lambda x: x[:, :position], inputs)
    run = programs.compiled(lattice.chunk)
    state, _ = run(state, before, spec=spec, implementation="xla_chunked")
  return state, fresh, gradients.cast_operands(inputs, dtype)


def run(implementation, spec, given, ids=None, *, gradient=True, **mode):
  """Values, and gradients if asked for."""

  def function(state, fresh, inputs):
    return lattice.chunk(
      state,
      inputs,
      spec=spec,
      segment_ids=ids,
      reset_state=fresh,
      implementation=implementation,
    )

  with launch.interpreted(**mode):
    return gradients.value_and_gradients(function, given, gradient=gradient)


def assert_close(actual, expected):
  bounds = tolerances.VALUE["float32"], tolerances.GRADIENT["float32"]
  for a, b, bound, part in zip(
    actual, expected, bounds, ("values", "gradients"), strict=True
  ):
    errors.assert_close(a, b, bound, part)


KERNELS = {"lattice_chunk_forward", "lattice_chunk_backward"}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["decoding", "encoding", "similarity"])
def test_objectives(objective, calls):
  """From a state inside a chunk; the last chunk stays open."""
  spec = dataclasses.replace(SPEC, objective=objective)
  given = arguments(spec, 40, position=OPEN)
  actual = run("mosaic_tpu", spec, given)
  assert calls == KERNELS
  assert_close(actual, run("xla_chunked", spec, given))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("change", "heads", "dim", "time"),
  [
    ({"forget_gate": False, "num_slots": 16}, 4, 32, 48),
    ({"chunk_size": 32}, 2, 32, 64),
    ({"num_slots": 128}, 1, 128, 32),
  ],
  ids=str,
)
def test_whole_chunks(change, heads, dim, time, calls):
  """The kernels without flags; grid steps that are filled up, heads in steps."""
  spec = dataclasses.replace(SPEC, **{"num_slots": min(dim, 64)} | change)
  given = arguments(spec, time, heads=heads, dim=dim)
  actual = run("mosaic_tpu", spec, given)
  assert calls == KERNELS
  assert_close(actual, run("xla_chunked", spec, given))


@rotation.both_parts
def test_packing(gradient):
  """Strictly: memory starts as nan, races are looked for."""
  ids = np.zeros((2, 50), np.int32)
  ids[0] = 1  # goes on, inside a chunk
  ids[1, :5], ids[1, 5:25], ids[1, 30:48] = 1, 2, 3
  given = SPEC, arguments(SPEC, 50, position=OPEN), jnp.array(ids)
  actual = run(
    "mosaic_tpu", *given, gradient=gradient, **interpreter.STRICT_TPU
  )
  assert_close(actual, run("xla_chunked", *given, gradient=gradient))


@pytest.mark.slow
def test_segments_that_start_inside_a_chunk():
  """The XLA form does such a call, which only its arrays tell."""
  state, _, inputs = arguments(SPEC, 40, position=OPEN)
  given = state, state, inputs
  ids = jnp.array([[1] * 7 + [2] * 15 + [3] * 18] * 2)
  actual = run("mosaic_tpu", SPEC, given, ids)
  assert_close(actual, run("xla_chunked", SPEC, given, ids))


@pytest.mark.slow
def test_edges():
  """Tokens that write nothing, and columns of which nothing is left."""
  state, fresh, inputs = arguments(SPEC, 32)
  inputs = inputs._replace(
    log_decay=inputs.log_decay.at[:, 15].set(-30.0),
    write_rate=inputs.write_rate.at[:, 3].set(0.0).at[:, 15].set(0.0),
    key=inputs.key.at[:, 5].set(0.0),
    value=inputs.value.at[:, 6].set(0.0),
  )
  state = state._replace(memory=state.memory.at[:, :, :, 0].set(0.0))
  given = state, fresh, inputs
  actual = run("mosaic_tpu", SPEC, given)
  assert_close(actual, run("xla_chunked", SPEC, given))


@pytest.mark.slow
@pytest.mark.parametrize("position", rotation.cases([0, OPEN], [OPEN]))
def test_decays_out_of_range(position, calls):
  """They cannot be taken apart: it is done again by the XLA form."""
  state, fresh, inputs = arguments(SPEC, 32, position=position)
  inputs = inputs._replace(log_decay=inputs.log_decay.at[0, 20].set(-jnp.inf))
  given = state, fresh, inputs
  actual = run("mosaic_tpu", SPEC, given)
  assert calls == KERNELS
  errors.assert_close(actual, run("xla_chunked", SPEC, given), 0.0, "equal")


@pytest.mark.slow
def test_bfloat16_is_no_worse_than_the_xla_form():
  given = arguments(SPEC, 48, position=OPEN, dtype="bfloat16")
  truth = run("xla_chunked", SPEC, gradients.cast(given, jnp.float32))
  xla, ours = (run(x, SPEC, given) for x in ("xla_chunked", "mosaic_tpu"))
  errors.assert_no_worse(ours, xla, truth)


@pytest.mark.slow
@pytest.mark.parametrize(
  "change", [{"update": "orthogonal"}, {"chunk_size": 8}]
)
def test_others_go_by_other_kernels(change, calls):
  spec = dataclasses.replace(SPEC, **change)
  run("mosaic_tpu", spec, arguments(spec, 16))
  assert calls and not calls & KERNELS


def test_chunks_that_are_too_long():
  for chunk_size, is_served in [(128, True), (256, False)]:
    spec = dataclasses.replace(SPEC, chunk_size=chunk_size)
    _, _, inputs = arguments(spec, 4)
    form = engine.form(dispatch.Call(None, inputs, spec))
    assert (engine.tokens(form, inputs) is not None) == is_served


@pytest.mark.slow
@pytest.mark.parametrize("is_wide", [False, True])
def test_under_shard_map(is_wide, calls):
  """Rows and heads over a mesh, in range and not.

  On all devices alike: interpreted kernels of several wait for each other.
  """
  state, fresh, inputs = arguments(SPEC, 32)
  low = inputs.log_decay.at[:, 20].set(-200.0)
  inputs = inputs._replace(log_decay=low if is_wide else inputs.log_decay)
  with launch.interpreted():
    _, actual = meshes.alone_and_over_a_mesh(
      lattice.chunk,
      (state, fresh, inputs),
      spec=SPEC,
      implementation="mosaic_tpu",
    )
  assert calls == KERNELS
  assert_close(actual, run("xla_chunked", SPEC, (state, fresh, inputs)))
