"""Models of every mixer, all of whose parameters are many times their start."""

import decoder_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcomp.layers import registry
from memcomp_kernels.testing import errors


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.MIXERS)
def test_gradients_are_finite(name):
  """Twenty times: log decays of Mamba2 and Gated DeltaNet are then -1e26."""
  graph, params = nnx.split(cases.build(cases.config(name)))
  ids = cases.tokens(2, 40)

  def loss(params):
    return jnp.mean(jnp.square(nnx.merge(graph, params)(ids)))

  large = jax.tree.map(lambda p: 20 * p, params)
  value, gradient = jax.jit(jax.value_and_grad(loss))(large)
  assert np.isfinite(value)
  errors.assert_finite(nnx.to_pure_dict(gradient), name)
