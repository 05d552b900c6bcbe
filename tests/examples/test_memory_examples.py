"""Each memory as an op and as a layer: what the pages of the memories show.

`test_quoted.py` holds docs/<memory>.md to the blocks that are marked here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def check(y, shape, state=None):
  assert y.shape == shape
  assert np.isfinite(y).all() and np.any(y)
  for leaf in jax.tree.leaves(state):
    assert leaf.shape[0] == BATCH and np.isfinite(leaf).all()


def test_trellis(qkv, x):
  (q, k, v), code = qkv, jax.random.normal(jax.random.key(2), (*SHAPE, 8))
  log_decay, rate = gate(-0.1), gate(0.1)
  # quoted: op
  from memcomp_kernels import trellis

  y, state = trellis(q, k, v, target=code, g=log_decay, write_rate=rate)
  # end
  check(y, v.shape, state)
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
  check(y, v.shape, state)
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
  check(y, v.shape, state)
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
  check(y, (*SHAPE, 2 * DIM), state)  # of the window, of the memory
  # quoted: layer
  from flax import nnx

  from memcomp.layers import TensorCache

  layer = TensorCache(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_delta_rule(qkv, x):
  (q, k, v), log_decay, beta = qkv, gate(-0.1), gate(0.5)
  # quoted: op
  from memcomp_kernels import gated_delta_rule

  y, state = gated_delta_rule(q, k, v, g=log_decay, beta=beta)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import GatedDeltaNet

  layer = GatedDeltaNet(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_state_space_duality(qkv, x):
  (q, k, v), log_decay, dt, skip = qkv, gate(-0.1), gate(0.5), gate(1.0)
  # quoted: op
  from memcomp_kernels import ssd

  y, state = ssd(q, k, v, g=log_decay, dt=dt, D=skip)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import Mamba2

  layer = Mamba2(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_linear_attention(qkv, x):
  q, k, v = qkv
  # quoted: op
  from memcomp_kernels import linear_attention

  y, state = linear_attention(q, k, v)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import LinearAttention

  layer = LinearAttention(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_infini_attention(qkv, x):
  (q, k, v), gates = qkv, gate(0.5)
  # quoted: op
  from memcomp_kernels import infini_attention

  y, state = infini_attention(q, k, v, read_gate=gates, segment_size=8)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import InfiniAttention

  layer = InfiniAttention(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_slot_attention(qkv, x):
  (q, k, v), log_decay = qkv, gate(-0.1, 8)
  # quoted: op
  from memcomp_kernels import gated_slot_attention

  y, state = gated_slot_attention(q, k, v, g=log_decay)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import SlotAttention

  layer = SlotAttention(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_rwkv7(qkv, x):
  (r, kappa, v), k = qkv, qkv[1]
  log_decay, a = gate(-0.1, DIM), gate(0.5, DIM)
  # quoted: op
  from memcomp_kernels import rwkv7

  y, state = rwkv7(r, log_decay, k, v, removal_key=kappa, write_rate=a)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import RWKV7

  layer = RWKV7(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_two_pass_delta(qkv, x):
  (q, k, v), log_decay, theta = qkv, gate(-0.1), gate(0.01)
  layer_input, x = x, k
  # quoted: op
  from memcomp_kernels import two_pass_delta

  y, state = two_pass_delta(q, k, v, source=x, g=log_decay, write_rate=theta)
  # end
  check(y, v.shape, state)
  x = layer_input
  # quoted: layer
  from flax import nnx

  from memcomp.layers import TwoPassDelta

  layer = TwoPassDelta(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_ovq(qkv, x):
  q, k, v = qkv
  # quoted: op
  from memcomp_kernels import ovq

  y, state = ovq(q, k, v, chunk_size=8, max_rows=16)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import OVQ

  layer = OVQ(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_test_time_training(qkv, x):
  (q, k, v), eta = qkv, gate(0.05)
  # quoted: op
  from memcomp_kernels import ttt

  y, state = ttt(q, k, v, eta=eta)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import TestTimeTraining

  layer = TestTimeTraining(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)


def test_softmax_attention(qkv, x):
  q, k, v = qkv
  # quoted: op
  from memcomp_kernels import softmax_attention

  y, state = softmax_attention(q, k, v)
  # end
  check(y, v.shape, state)
  # quoted: layer
  from flax import nnx

  from memcomp.layers import SoftmaxAttention

  layer = SoftmaxAttention(512, heads=8, rngs=nnx.Rngs(0))
  y = layer(x)  # [batch, time, 512] to the same
  # end
  check(y, x.shape)
