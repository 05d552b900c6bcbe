"""Step sizes at the ends of their parameters' ranges."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp.layers import step_size
from memcomp_kernels.testing import errors


def test_any_rate_is_finite_and_so_are_its_gradients():
  x = jnp.array([[-300.0, 0.0, 300.0]])
  size = step_size.StepSize(
    3, smallest_rate=1.0, largest_rate=16.0, rngs=nnx.Rngs(0)
  )
  graph, params = nnx.split(size)

  def decays(params, x, rate_log):
    size = nnx.merge(graph, params)
    size.rate_log[...] = jnp.full(3, rate_log)
    return size(x)[1].sum()

  for rate_log in (-300.0, 5.0, 300.0):
    found = jax.value_and_grad(decays, (0, 1, 2))(params, x, rate_log)
    errors.assert_finite(found, f"rate_log={rate_log}")


def test_rates_in_use_are_not_bounded():
  size = step_size.StepSize(
    1, smallest_rate=1.0, largest_rate=16.0, rngs=nnx.Rngs(0)
  )
  size.rate_log[...], size.bias[...] = jnp.array([25.0]), jnp.zeros(1)
  np.testing.assert_allclose(
    size(jnp.zeros(1))[1], -np.exp(25) * np.log(2), rtol=1e-5
  )
