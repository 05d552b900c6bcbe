"""Each memory as an op and as a layer: what the pages of the memories show.

`test_quoted.py` holds docs/<memory>.md to the blocks that are marked here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

SHAPE = BATCH, TIME, HEADS = 2, 32, 4
DIM = 16

pytestmark = pytest.mark.slow


@pytest.fixture
def qkv():
  """Queries, keys and values `[batch, time, heads, dim]`, keys of length 1."""
  q, k, v = jax.random.normal(jax.random.key(0), (3, *SHAPE, DIM))
  return q, k / jnp.linalg.norm(k, axis=-1, keepdims=True), v


@pytest.fixture
def x():
  return jax.random.normal(jax.random.key(1), (BATCH, TIME, 512))


def gate(value, *dims):
  return jnp.full((*SHAPE, *dims), value)


def check(y, shape):
  assert y.shape == shape
  assert np.isfinite(y).all() and np.any(y)


def test_trellis(qkv, x):
  (q, k, v), code = qkv, jax.random.normal(jax.random.key(2), (*SHAPE, 8))
  log_decay, rate = gate(-0.1), gate(0.1)
  # quoted: op
  from memcomp_kernels import trellis

  y, state = trellis(q, k, v, target=code, g=log_decay, write_rate=rate)
  # end
  check(y, v.shape)
  assert state.key_memory.shape == (BATCH, HEADS, 8, DIM)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import Trellis

  layer = Trellis(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_lattice(qkv, x):
  (q, k, v), log_decay, rate = qkv, gate(-0.1), gate(0.3)
  # quoted: op
  from memcomp_kernels import lattice

  y, state = lattice(q, k, v, g=log_decay, write_rate=rate)
  # end
  check(y, v.shape)
  lengths = jnp.linalg.norm(state.memory, axis=-2)
  assert jnp.allclose(lengths, 1, atol=1e-5)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import Lattice

  layer = Lattice(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_key_value_means(qkv, x):
  (q, k, v), gate_of_merges = qkv, gate(1.0)
  # quoted: op
  from memcomp_kernels import key_value_means

  y, state = key_value_means(
    q, k, v, merge_gate=gate_of_merges, chunk_size=8, rotary_dim=8
  )
  # end
  check(y, v.shape)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import KeyValueMeans

  layer = KeyValueMeans(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_tensor_cache(qkv, x):
  (q, k, v), log_decay, rate = qkv, gate(-0.005), gate(0.05)
  # quoted: op
  from memcomp_kernels import tensor_cache

  y, state = tensor_cache(
    q, k, v, g=log_decay, write_rate=rate, window_size=8, chunk_size=4
  )
  # end
  check(y, (*SHAPE, 2 * DIM))  # of the window, of the memory
  # quoted: layer
  from flax import nnx

  from memcomp.layers import TensorCache

  layer = TensorCache(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)
