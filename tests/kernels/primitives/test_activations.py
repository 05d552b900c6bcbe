"""Activations: how steep they can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels.math import activations

SLOTS = 5
HAS_EPS = ("ln_silu", "l2_silu", "l2")


def slopes(name, eps, points):
  """Operator norms of the Jacobian at each of the points."""
  jacobian = jax.jacobian(lambda z: activations.activate(name, z, eps))
  return np.linalg.norm(jax.vmap(jacobian)(points), ord=2, axis=(1, 2))


@pytest.mark.parametrize("eps", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_steepness_bounds_the_jacobian_and_is_not_idle(name, eps):
  keys = jax.random.split(jax.random.key(0), 2)
  points = jax.random.normal(keys[0], (3000, SLOTS))
  # From the steep middle to far out, and silu's steepest point everywhere.
  points = points * 10 ** jax.random.uniform(
    keys[1], (3000, 1), minval=-4, maxval=2
  )
  steepest = jnp.full((1, SLOTS), 2.3994)
  pair = jnp.array([[0.0, 0.0] + [-60.0] * (SLOTS - 2)])
  points = jnp.concatenate([points, steepest, pair])
  found = slopes(name, eps, points).max()
  bound = float(activations.steepness(name, eps))
  assert found <= bound * (1 + 1e-5)
  # Silu is steepest where the norm it stands under is not.
  assert found >= bound * (0.35 if "_silu" in name else 0.999)


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_eps_may_differ_from_row_to_row(name):
  rows = jax.random.normal(jax.random.key(1), (3, SLOTS))
  target = jnp.ones((3, SLOTS))
  eps = jnp.array([[0.1], [1.0], [10.0]])
  found = activations.write_direction(name, rows, target, eps)
  for i, value in enumerate(eps[:, 0]):
    alone = activations.write_direction(
      name, rows[i : i + 1], target[:1], float(value)
    )
    np.testing.assert_allclose(found[i], alone[0], rtol=1e-5, atol=1e-6)
  assert activations.steepness(name, eps).shape == eps.shape
  moved = activations.write_direction(name, rows, target, 2 * eps)
  assert bool(jnp.any(moved != found)) == (name in HAS_EPS)
