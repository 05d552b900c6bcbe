"""A tile of decayed outer products, against a plain loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from memcomp_kernels import affine

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_tile_is_the_loop(groups):
  rng = np.random.default_rng(0)
  heads, time = 4, 6
  memory = rng.standard_normal((2, heads, 3, 5))
  query, key = rng.standard_normal((2, 2, groups, time, 3))
  written = rng.standard_normal((2, heads, time, 5))
  log_decay = -rng.random((2, heads, time))
  prepared = affine.outer_tile(
    *(jnp.array(x) for x in (query, key, written, log_decay))
  )
  found, outputs = affine.run(jnp.array(memory), prepared)
  own = np.arange(heads) // (heads // groups)  # the group of each head
  for t in range(time):
    write = key[:, own, t, :, None] * written[:, :, t, None]
    memory = np.exp(log_decay[:, :, t, None, None]) * memory + write
    y = np.einsum("bhk,bhkv->bhv", query[:, own, t], memory)
    np.testing.assert_allclose(outputs[:, :, t], y, rtol=1e-10, atol=1e-12)
  np.testing.assert_allclose(found, memory, rtol=1e-10, atol=1e-12)


def test_heads_are_split_and_joined():
  x = jnp.arange(8).reshape(1, 8, 1)
  groups = affine.split_heads(x, 2)
  np.testing.assert_array_equal(
    groups[0, :, :, 0], [[0, 1, 2, 3], [4, 5, 6, 7]]
  )
  np.testing.assert_array_equal(affine.join_heads(groups), x)
