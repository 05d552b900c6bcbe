"""Decay factors and forward substitution, against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels.primitives import activations, decay, substitution


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def test_decay_factors_by_hand():
  factors = decay.decay_factors(jnp.log(jnp.array([0.5, 0.25, 0.8])))
  np.testing.assert_allclose(factors.from_start, [0.5, 0.125, 0.1])
  np.testing.assert_allclose(
    factors.between, [[1, 0, 0], [0.25, 1, 0], [0.2, 0.8, 1]]
  )
  np.testing.assert_allclose(factors.to_end, [0.2, 0.8, 1])
  np.testing.assert_allclose(factors.total, 0.1)
  before = decay.decay_before(jnp.log(jnp.array([0.5, 0.25, 0.8])))
  np.testing.assert_allclose(before.from_start, [1, 0.5, 0.125])
  np.testing.assert_allclose(
    before.between, [[0, 0, 0], [1, 0, 0], [0.25, 1, 0]]
  )


def test_factors_stay_finite_where_products_underflow():
  log_decay = jnp.full(128, -20.0, jnp.float32)
  gradient = jax.grad(
    lambda x: sum(jnp.sum(leaf) for leaf in decay.decay_factors(x))
  )(log_decay)
  assert jnp.all(jnp.isfinite(gradient))
  between = decay.decay_factors(log_decay).between
  np.testing.assert_allclose(between[100, 99], np.exp(-20.0), rtol=1e-4)


def loop(direction, base, coupling, target):
  """The system token by token, differentiated by unrolling."""
  u = []
  for t in range(base.shape[-2]):
    z = base[..., t, :]
    for i in range(t):
      z = z - coupling[..., t, i, None] * u[i]
    u.append(direction(z, target[..., t, :]))
  return jnp.stack(u, axis=-2)


@pytest.mark.parametrize("phi", ["ln_silu", "softmax", "identity"])
@pytest.mark.parametrize("time", [1, 2, 9])
def test_substitution_solves_the_system(phi, time):
  rng = np.random.default_rng(0)
  arguments = (
    rng.standard_normal((2, time, 4)),
    rng.standard_normal((2, time, time)),
    rng.standard_normal((2, time, 4)),
  )
  cotangent = rng.standard_normal((2, time, 4))

  def direction(z, target):
    return activations.write_direction(phi, z, target, 0.1)

  def run(solve):
    solve = functools.partial(solve, direction)
    value, vjp = jax.vjp(solve, *map(jnp.asarray, arguments))
    return value, vjp(jnp.asarray(cotangent))

  solved, unrolled = run(substitution.solve), run(loop)
  np.testing.assert_allclose(solved[0], unrolled[0], rtol=1e-12, atol=1e-12)
  for a, b in zip(solved[1], unrolled[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_linear_direction_is_the_triangular_inverse():
  """phi = identity: u = (I + L)^-1 (base - target), the delta rule's system."""
  rng = np.random.default_rng(1)
  base, target = rng.standard_normal((2, 12, 5))
  coupling = np.tril(rng.standard_normal((12, 12)), -1)
  u = substitution.solve(lambda z, a: z - a, base, coupling, target)
  inverse = np.linalg.inv(np.eye(12) + coupling)
  np.testing.assert_allclose(u, inverse @ (base - target), rtol=1e-9)
