"""Trellis with gradients per token: every way to solve a tile is exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation

from memcomp_kernels import trellis
from memcomp_kernels.math import delta
from memcomp_kernels.math import solver as solver_lib
from memcomp_kernels.testing import errors, memories
from memcomp_kernels.trellis import tilings

TIME = 37
SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 7}
SPEC = trellis.Spec(num_slots=6, gradient_at="token")

XLA = functools.partial(trellis.chunk, implementation="xla_chunked")
WITH_STATS = functools.partial(trellis.with_stats, implementation="xla_chunked")

Solver = solver_lib.Solver
TILINGS = {
  "default": tilings.Tiling(),
  "a tile longer than the sequence": tilings.Tiling(tile_time=64),
  "blocks": tilings.Tiling(tile_time=16, solver=Solver(block_time=4)),
  "sweeps": tilings.Tiling(
    tile_time=16, solver=Solver(method="sweeps", max_sweeps=16)
  ),
  "sweeps given up": tilings.Tiling(
    tile_time=8, solver=Solver(method="sweeps", max_sweeps=2)
  ),
  "nested sweeps": tilings.Tiling(
    tile_time=16, solver=Solver(method="sweeps", block_time=4, tolerance=0)
  ),
}


pytestmark = pytest.mark.usefixtures("float64")


def typical():
  memory = memories.MEMORIES["trellis"]
  keys = jax.random.split(jax.random.key(0))
  inputs = memory.make_inputs(keys[0], SPEC, time=TIME, **SIZES)
  return memory.make_state(keys[1], SPEC, **SIZES), inputs


def harder():
  """Inputs on which short cuts fail or rounding could hurt."""
  _, inputs = typical()
  rate = jnp.ones_like(inputs.write_rate)
  repeated = jnp.broadcast_to(inputs.key[:, :1], inputs.key.shape)
  same = jnp.broadcast_to(inputs.value[:, :1], inputs.value.shape)
  return {
    "typical": inputs,
    "repeated keys": inputs._replace(key=repeated, value=same, write_rate=rate),
    "large rates": inputs._replace(write_rate=2 * rate),
    "zero keys": inputs._replace(key=0 * inputs.key, value=0 * inputs.value),
    "tiny decay": inputs._replace(log_decay=inputs.log_decay - 1e4),
    "no decay": inputs._replace(log_decay=0 * inputs.log_decay),
  }


def differentiated(run):
  """(state, inputs) -> (outputs, gradients); random cotangents."""

  def loss(memories_, inputs, state):
    state = state._replace(key_memory=memories_[0], value_memory=memories_[1])
    after, y = run(state, inputs)
    results = y, after.key_memory, after.value_memory
    rng = np.random.default_rng(5)
    weighted = [jnp.sum(x * rng.standard_normal(x.shape)) for x in results]
    return sum(weighted), results

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

  def both(state, inputs):
    memories_ = state.key_memory, state.value_memory
    gradients, results = gradient(memories_, inputs, state)
    return results, gradients

  return both


@functools.cache
def expected(name):
  state, _ = typical()
  run = differentiated(
    functools.partial(trellis.chunk, implementation="reference", spec=SPEC)
  )
  return run(state, harder()[name])


@pytest.mark.parametrize(
  "name",
  rotation.cases(TILINGS),
)
def test_exact_whatever_the_tiling(name):
  run = functools.partial(XLA, spec=SPEC, tiling=TILINGS[name])
  run = differentiated(run)
  state, _ = typical()
  for name, inputs in harder().items():
    results, gradients = run(state, inputs)
    true_results, true_gradients = expected(name)
    pairs = zip(results, true_results, strict=True)
    for found, true in pairs:
      assert errors.relative_rms(found, true) < 1e-12, name
    found, true = jax.tree.leaves(gradients), jax.tree.leaves(true_gradients)
    for a, b in zip(found, true, strict=True):
      assert errors.relative_rms(a, b) < 1e-10, name


@pytest.mark.slow
def test_stats_of_all_tiles_and_both_passes():
  state, inputs = typical()

  def stats(tiling):
    run = jax.jit(functools.partial(WITH_STATS, spec=SPEC, tiling=tiling))
    return run(state, inputs)[2]

  found = stats(TILINGS["sweeps"])
  assert found.blocks.shape == (2, 2)
  np.testing.assert_array_equal(found.blocks, 2 * 3)  # passes, tiles
  assert np.all(found.sweeps > found.blocks)
  assert np.all(found.unreached == 0) and np.all(found.residual < 1e-14)
  given_up = stats(TILINGS["sweeps given up"])
  assert np.all(given_up.unreached > 0) and np.all(given_up.residual > 1e-6)
  assert not np.any(stats(TILINGS["blocks"]).sweeps)


@pytest.mark.slow
def test_stale_gradients_have_nothing_to_solve():
  memory = memories.MEMORIES["trellis"]
  spec = trellis.Spec(num_slots=6, chunk_size=4)
  state = memory.make_state(jax.random.key(1), spec, **SIZES)
  _, inputs = typical()
  assert WITH_STATS(state, inputs, spec=spec)[2] is None


@pytest.mark.slow
def test_identity_is_the_gated_delta_rule():
  """phi = identity, pass 1: M_t = beta M - gamma (M k - alpha) k^T."""
  spec = trellis.Spec(
    num_slots=6,
    gradient_at="token",
    phi="identity",
    read_activation="identity",
  )
  state, inputs = typical()
  after, _ = jax.jit(functools.partial(XLA, spec=spec))(state, inputs)
  for row in np.ndindex(2, 2):
    beta = np.exp(inputs.log_decay[row[0], :, row[1], 0])
    gamma = np.asarray(inputs.write_rate[row[0], :, row[1], 0])
    k = np.asarray(inputs.key[row[0], :, row[1]])
    alpha = np.asarray(inputs.target[row[0], :, row[1]])
    M = np.asarray(state.key_memory[row])
    mu = np.cumprod(beta)
    before = np.concatenate([[1.0], mu[:-1]])
    share = np.tril(before[:, None] / mu[None], -1)  # mu_{t-1} / mu_i
    # All tokens at once, by the unit-triangular inverse.
    coupling = share * (k @ k.T) * gamma[None]
    u = delta.solve(coupling, alpha - before[:, None] * (k @ M.T))
    expected = mu[-1] * M + (u * (gamma * mu[-1] / mu)[:, None]).T @ k
    error = errors.relative_rms(after.key_memory[row], expected)
    assert error < 1e-12


@pytest.mark.slow
def test_memory_does_not_grow_with_sweeps():
  """Only tile-start memories are kept, however long a tile is swept."""
  state, inputs = typical()

  def kept(max_sweeps):
    solver = Solver(method="sweeps", max_sweeps=max_sweeps)
    tiling = tilings.Tiling(tile_time=16, solver=solver)

    def loss(inputs):
      return jnp.sum(XLA(state, inputs, spec=SPEC, tiling=tiling)[1])

    compiled = jax.jit(jax.grad(loss)).lower(inputs).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert kept(16) == kept(2)


def test_a_tiling_names_its_bad_field():
  with pytest.raises(ValueError, match="tile_time=0"):
    tilings.Tiling(tile_time=0)
