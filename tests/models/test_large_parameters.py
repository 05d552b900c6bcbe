"""Every mixer, all of whose parameters are many times their start."""

import decoder_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import registry

WIDTH, TOKENS = 16, 96


# Each kind of decay, in every run.
@pytest.mark.parametrize(
  "name",
  rotation.cases(
    registry.MIXERS, ["trellis", "lattice", "tensor_cache", "mamba2", "rwkv7"]
  ),
)
def test_gradients_are_finite(name):
  """Twenty times: rates of decay are then exp of fifty, and of minus hundred."""
  x = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))

  @jax.jit
  def gradients(x):
    layer = registry.MIXERS[name].from_config(
      cases.MIXERS[name], WIDTH, std=0.2, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(layer)

    def loss(params, x):
      layer = nnx.merge(graph, params)
      return jnp.sum(jnp.sin(layer(x, layer.init_state(2))[0]))

    large = jax.tree.map(lambda p: 20 * p, params)
    return jax.value_and_grad(loss, (0, 1))(large, x)

  loss, (of_params, of_x) = gradients(x)
  assert np.isfinite(loss)
  wrong = [
    jax.tree_util.keystr(path)
    for path, g in jax.tree_util.tree_leaves_with_path((of_params, of_x))
    if not np.isfinite(g).all()
  ]
  assert not wrong
