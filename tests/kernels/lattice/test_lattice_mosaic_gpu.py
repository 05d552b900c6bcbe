"""Lattice's GPU kernels: interpreted, against the XLA form; lowered.

On a GPU, the same for real: see `test_affine_mosaic_gpu`.
"""

import dataclasses
import functools

import interpreter
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import rotation

from memcomp_kernels import dispatch, lattice
from memcomp_kernels.lattice import tile
from memcomp_kernels.lattice.pallas_gpu import engine
from memcomp_kernels.pallas_gpu import tile_kernel
from memcomp_kernels.testing import errors, gradients, memories

SPEC = lattice.Spec(num_slots=64, chunk_size=16)
MEMORY = memories.MEMORIES["lattice"]
COMPILED = programs.of(lattice)


@gradients.on_cpu
def arguments(spec, time, batch=1, before=5, value_dim=64):
  """A state inside a chunk, one that segments start from, and inputs."""
  sizes = {
    "batch": batch,
    "heads": 2,
    "key_dim": 64,
    "value_dim": value_dim,
  }
  inputs = MEMORY.make_inputs(
    jax.random.key(0), spec, time=time + before, **sizes
  )
  inputs = gradients.cast(inputs, jnp.float32)
  state, fresh = (
    MEMORY.make_state(jax.random.key(i), spec, **sizes) for i in (1, 2)
  )
  begun = jax.tree.map(lambda x: x[:, :before], inputs)
  state, _ = COMPILED.reference(state, begun, spec=spec)
  inputs = jax.tree.map(lambda x: x[:, before:], inputs)
  return state, fresh, gradients.cast_operands(inputs, "bfloat16")


def run(chunk, spec, given, ids=None, *, gradient=True, **mode):
  """Values, and gradients if asked for."""

  def function(state, fresh, inputs):
    return chunk(state, inputs, spec=spec, segment_ids=ids, reset_state=fresh)

  with tile_kernel.tried(**mode):
    return gradients.value_and_gradients(function, given, gradient=gradient)


def check(spec, given, ids=None, *, gradient=True, **mode):
  """The kernel errs by no more than twice what the XLA form errs by itself."""
  of = functools.partial(run, gradient=gradient)
  on_cpu, wide = gradients.on_cpu(of), gradients.cast(given, jnp.float32)
  truth = on_cpu(lattice.reference, spec, wide, ids)
  expected = on_cpu(programs.direct(tile.chunk), spec, given, ids)
  actual = of(programs.direct(engine.chunk), spec, given, ids, **mode)
  errors.assert_no_worse(actual, expected, truth)


@rotation.both_parts
def test_packing(gradient):
  """Strictly: memory starts as nan, races are looked for."""
  ids = np.zeros((2, 40), np.int32)
  ids[0] = 1  # goes on, inside a chunk
  ids[1, 3:20], ids[1, 25:] = 5, 2
  given = arguments(SPEC, 40, batch=2)
  check(
    SPEC, given, jnp.array(ids), gradient=gradient, **interpreter.STRICT_GPU
  )


@pytest.mark.slow
def test_segments_that_start_inside_a_chunk():
  """The XLA form does such a call, which only its arrays tell."""
  state, _, inputs = arguments(SPEC, 40)
  ids = jnp.array([[1] * 7 + [2] * 15 + [3] * 18])
  check(SPEC, (state, state, inputs), ids)


@pytest.mark.slow
def test_whole_chunks():
  """No chunk under way, none left open: the kernels without flags.

  Each token writes along its own column, in part: not all of that is tangent.
  """
  spec = dataclasses.replace(SPEC, objective="similarity")
  state, fresh, inputs = arguments(spec, 32, before=16)
  columns = jnp.moveaxis(state.memory[..., :32], -1, 1)
  value = 0.8 * columns + inputs.value.astype(jnp.float32)
  own = jnp.broadcast_to(jnp.eye(32, 64)[:, None], inputs.key.shape)
  key = own + 0.1 * inputs.key.astype(jnp.float32)
  inputs = inputs._replace(
    key=key.astype(jnp.bfloat16),
    value=value.astype(jnp.bfloat16),
    write_rate=jnp.ones_like(inputs.write_rate),
  )
  check(spec, (state, fresh, inputs))


@pytest.mark.slow
def test_a_row_of_padding():
  """Inside a chunk, whose start is handed on, and so is its adjoint."""
  ids = jnp.array([[0] * 6, [0] * 2 + [1] * 4])
  check(SPEC, arguments(SPEC, 6, batch=2), ids)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["decoding", "encoding"])
def test_wide_heads(objective):
  """Where results take the place of operands in shared memory."""
  spec = dataclasses.replace(SPEC, objective=objective)
  check(spec, arguments(spec, 40, value_dim=128), **interpreter.STRICT_GPU)


@pytest.mark.slow
@pytest.mark.parametrize(
  "change",
  [
    {"objective": "encoding"},
    {"objective": "similarity"},
    {"forget_gate": False},
    {"chunk_size": 64},
  ],
  ids=str,
)
def test_other_meanings(change):
  spec = dataclasses.replace(SPEC, **change)
  check(spec, arguments(spec, 70))


@pytest.mark.slow
def test_edges():
  """Tokens that write nothing, and columns of which nothing is left."""
  state, fresh, inputs = arguments(SPEC, 32, before=16)
  inputs = inputs._replace(
    log_decay=inputs.log_decay.at[:, 15].set(-30.0),
    write_rate=inputs.write_rate.at[:, 3].set(0.0).at[:, 15].set(0.0),
    key=inputs.key.at[:, 5].set(0.0),
    value=inputs.value.at[:, 6].set(0.0),
  )
  state = state._replace(memory=state.memory.at[:, :, :, 0].set(0.0))
  check(SPEC, (state, fresh, inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid|overflow):RuntimeWarning")
def test_decays_out_of_range():
  """They cannot be taken apart: it is done again by the XLA form."""
  state, fresh, inputs = arguments(SPEC, 20)
  inputs = inputs._replace(log_decay=inputs.log_decay.at[0, 9].set(-jnp.inf))
  given = state, fresh, inputs
  actual = run(programs.direct(engine.chunk), SPEC, given)
  expected = run(programs.direct(tile.chunk), SPEC, given)
  errors.assert_close(actual, expected, 0.0, "equal")


@pytest.mark.parametrize("value_dim", rotation.cases([64, 128]))
def test_lowers(value_dim):
  """Both ways, for calls that start a chunk and that do not."""
  state, fresh, inputs = arguments(SPEC, 20, before=16, value_dim=value_dim)

  def loss(inputs):
    _, output = programs.direct(engine.chunk)(
      state, inputs, spec=SPEC, reset_state=fresh
    )
    return jnp.sum(jnp.square(output.astype(jnp.float32)))

  with tile_kernel.lowered():
    traced = jax.jit(jax.grad(loss)).trace(inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("mosaic_gpu_v2") >= 4


def test_says_why_not(monkeypatch):
  monkeypatch.setattr(dispatch, "current_platform", lambda: "cpu")
  state, _, inputs = arguments(SPEC, 8)
  with pytest.raises(NotImplementedError, match="devices in use are of cpu"):
    lattice.chunk(state, inputs, spec=SPEC, implementation="mosaic_gpu")
  with tile_kernel.lowered():
    wide = inputs._replace(query=inputs.query.astype(jnp.float32))
    with pytest.raises(NotImplementedError, match="must all be bfloat16"):
      lattice.chunk(state, wide, spec=SPEC, implementation="mosaic_gpu")
    for change, said in (
      ({"gradient_at": "token"}, "gradients per token"),
      ({"update": "orthogonal"}, "update='orthogonal'"),
      ({"sparsity": 0.1}, "sparsity=0.1"),
      ({"chunk_size": 128}, "chunk_size=128 is more than 64"),
      ({"num_slots": 32}, "num_slots=32 is none of"),
    ):
      spec = dataclasses.replace(SPEC, **change)
      assert said in engine.unsupported(dispatch.Call(None, inputs, spec))
