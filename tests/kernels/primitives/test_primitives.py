"""Decay factors, against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels.math import decay

pytestmark = pytest.mark.usefixtures("float64")


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
