"""Activations as TPU kernels compute them, against their definitions.

All that a kernel does differently for another phi or f is in these functions:
with them right for every name, one name through the kernels stands for all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels.math import activations
from memcomp_kernels.pallas_tpu import activations as activations_lib

SLOTS, TOKENS = 6, 5


def operands():
  keys = jax.random.split(jax.random.key(0), 4)
  z = 3 * jax.random.normal(keys[0], (TOKENS, SLOTS))
  target = jax.random.normal(keys[1], (TOKENS, SLOTS))
  rate = jax.random.uniform(keys[2], (TOKENS, 1))
  eps = 0.1 + jax.random.uniform(keys[3], (TOKENS, 1))
  return z, target, rate, eps


def assert_same(expected, actual, arguments):
  """Values, and pullbacks of the same cotangent to all arguments."""
  value, pull = jax.vjp(expected, *arguments)
  found, pull_found = jax.vjp(actual, *arguments)
  cotangent = jnp.cos(jnp.arange(value.size, dtype=value.dtype))
  cotangent = cotangent.reshape(value.shape)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11),
    (found, *pull_found(cotangent)),
    (value, *pull(cotangent)),
  )


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_activate(name):
  with jax.enable_x64(True):
    z, _, scale, eps = operands()
    assert_same(
      lambda z, eps, scale: scale * activations.activate(name, z, eps),
      lambda z, eps, scale: (
        activations_lib.activate(name, z.T / 2, eps.T, scale.T).T
      ),
      (z, eps, scale),
    )


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_direction(name):
  def actual(z, target, rate, eps):
    prepared = activations_lib.prepare_target(name, target.T)
    rate = activations_lib.rate_scale(name, SLOTS) * rate.T
    return activations_lib.direction(name, z.T / 2, prepared, eps.T, rate).T

  def expected(z, target, rate, eps):
    return 0.5 * rate * activations.write_direction(name, z, target, eps)

  with jax.enable_x64(True):
    assert_same(expected, actual, operands())


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_adjoint_of_targets(name):
  """Kernels prepare what comes back to a target as they prepare a target."""
  with jax.enable_x64(True):
    _, target, *_ = operands()
    _, pull = jax.vjp(lambda x: activations_lib.prepare_target(name, x), target)
    np.testing.assert_allclose(
      pull(target)[0], activations_lib.prepare_target(name, target), atol=1e-12
    )
