"""Non-linear triangular systems: every way to the same solution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation

from memcomp_kernels.math import activations
from memcomp_kernels.math import solver as solver_lib

Solver = solver_lib.Solver
SOLVERS = {
  "substitution": Solver(),
  "substitution in blocks": Solver(block_time=4),
  "sweeps": Solver(method="sweeps", max_sweeps=100),
  "sweeps in blocks": Solver(method="sweeps", block_time=4, tolerance=0),
  "sweeps given up": Solver(method="sweeps", max_sweeps=2),
}


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


def loop(direction, base, coupling, target):
  """The system token by token, differentiated by unrolling."""
  u = []
  for t in range(base.shape[-2]):
    z = base[..., t, :]
    for i in range(t):
      z = z - coupling[..., t, i, None] * u[i]
    u.append(direction(z, target[..., t, :]))
  return jnp.stack(u, axis=-2)


def solve(direction, base, coupling, target, solver=None):
  return solver_lib.solve(direction, base, coupling, target, solver)[0]


def case(time, slots=4, strength=1.0, dtype=np.float64):
  rng = np.random.default_rng(0)
  normal = rng.standard_normal
  arrays = (
    normal((2, time, slots)),
    strength * normal((2, time, time)),
    normal((2, time, slots)),
  )
  return tuple(jnp.asarray(x, dtype) for x in arrays), normal(
    (2, time, slots)
  ).astype(dtype)


def direction_of(phi, eps=0.1):
  return lambda z, target: activations.write_direction(phi, z, target, eps)


def differentiated(function, arguments, cotangent):
  @jax.jit
  def both(arguments, cotangent):
    value, vjp = jax.vjp(function, *arguments)
    return value, vjp(cotangent)

  return both(arguments, cotangent)


# The others take turns.
@pytest.mark.parametrize(
  "solver",
  [
    pytest.param(
      solver,
      id=name,
      marks=[pytest.mark.slow] * (name != "substitution in blocks"),
    )
    for name, solver in SOLVERS.items()
  ],
)
@pytest.mark.parametrize(
  ("phi", "time"),
  rotation.cases(
    [("ln_silu", t) for t in (1, 2, 5, 9)] + [("softmax", 9)],
    [("ln_silu", 5)],  # more than one block, with few couplings to unroll
  ),
)
def test_solves_the_system(phi, time, solver):
  arguments, cotangent = case(time)
  direction = direction_of(phi)
  solved = differentiated(
    functools.partial(solve, direction, solver=solver), arguments, cotangent
  )
  unrolled = differentiated(
    functools.partial(loop, direction), arguments, cotangent
  )
  np.testing.assert_allclose(solved[0], unrolled[0], rtol=1e-12, atol=1e-12)
  for a, b in zip(solved[1], unrolled[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_linear_direction_is_the_triangular_inverse():
  """phi = identity: u = (I + L)^-1 (base - target), the delta rule's system."""
  (base, coupling, target), _ = case(12)
  base, coupling, target = base[0], jnp.tril(coupling[0], -1), target[0]
  u = solve(lambda z, a: z - a, base, coupling, target)
  inverse = np.linalg.inv(np.eye(12) + coupling)
  np.testing.assert_allclose(u, inverse @ (base - target), rtol=1e-9)


@pytest.mark.slow
def test_stats_tell_what_was_done():
  arguments, _ = case(16, strength=0.1)

  def stats(**settings):
    solver = Solver(method="sweeps", **settings)
    return solver_lib.solve(direction_of("ln_silu"), *arguments, solver)[1]

  found = stats(max_sweeps=16)
  assert np.all(found.blocks == 1) and np.all(found.unreached == 0)
  assert np.all(found.sweeps > 2) and np.all(found.residual <= 1e-6)
  few = stats(max_sweeps=2)
  assert np.all(few.sweeps == 2) and np.all(few.unreached == 1)
  assert np.all(few.residual > 1e-6)
  loose = stats(tolerance=1e6)  # of float32, times the ratio of roundings
  assert np.all(loose.sweeps < found.sweeps)
  blocks = stats(block_time=4, tolerance=0)
  assert np.all(blocks.blocks == 4) and np.all(blocks.sweeps == 12)
  assert not np.any(
    solver_lib.solve(direction_of("ln_silu"), *arguments)[1].sweeps
  )


@pytest.mark.slow
def test_a_gradient_that_gives_up_says_so(caplog):
  arguments, cotangent = case(16, strength=0.1)
  direction = direction_of("ln_silu")

  def warnings(**settings):
    solver = Solver(method="sweeps", **settings)
    caplog.clear()
    function = functools.partial(solve, direction, solver=solver)
    jax.block_until_ready(
      jax.jit(lambda *x: differentiated(function, x, cotangent))(*arguments)
    )
    jax.effects_barrier()
    return [record.getMessage() for record in caplog.records]

  # Rows of a batch are blocks of their own.
  (message,) = warnings(max_sweeps=2)
  assert "the gradient of 2 blocks did not come within" in message
  assert not warnings(max_sweeps=16)


def overflowing(z, target):  # row 5 overflows
  return z * z - target


@functools.cache
def overflowed():
  """A system whose row 5 overflows, and its solution token by token."""
  (base, coupling, target), _ = case(8)
  arguments = base.at[:, 5:].mul(1e200), 0.1 * coupling, target
  run = jax.jit(functools.partial(loop, overflowing))
  return jax.device_get((arguments, run(*arguments)))


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_row_that_overflows_leaves_finished_rows_alone(solver):
  """0 * inf in a masked product would make every row nan."""
  arguments, expected = overflowed()
  run = jax.jit(functools.partial(solve, overflowing, solver=solver))
  found = np.asarray(run(*arguments))
  assert np.all(np.isfinite(expected[:, :5]))
  assert not np.any(np.isfinite(expected[:, 5]))
  np.testing.assert_allclose(found[:, :5], expected[:, :5], rtol=1e-9)


@pytest.mark.slow
def test_overflow_on_the_way_does_not_stay():
  """Rows that overflow while others are unfinished come out right."""
  (base, coupling, target), _ = case(12)

  def direction(z, target):  # finite where it is read in the end
    return jnp.where(jnp.abs(z) > 1.5, jnp.inf, z) - target

  # Each row but the first overflows until the one before it is there.
  coupling = jnp.diag(jnp.ones(11), -1) * jnp.ones((2, 1, 1))
  target = jnp.zeros_like(target)
  base = jnp.full_like(base, 2).at[:, 0].set(1)
  expected = loop(direction, base, coupling, target)
  assert np.all(np.isfinite(expected))
  solver = Solver(method="sweeps", max_sweeps=12)
  u, stats = solver_lib.solve(direction, base, coupling, target, solver)
  np.testing.assert_allclose(u, expected, rtol=1e-12)
  assert not np.any(stats.unreached)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("method", "guess"),
    ("block_time", 0),
    ("tolerance", -1.0),
    ("max_sweeps", 0),
  ],
)
def test_bad_settings_are_named(field, value):
  with pytest.raises(ValueError, match=f"{field}="):
    Solver(**{field: value})
