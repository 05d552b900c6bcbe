"""Ops in a stranger's code: what docs and READMEs quote.

Each body is what one would type. Asserts show what holds.
"""

import pytest


def test_an_op_in_one_line():
  import jax
  import jax.numpy as jnp

  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  log_decay, beta = jnp.full((2, 64, 4), -0.1), jnp.full((2, 64, 4), 0.5)

  # quoted: an op
  from memcomp_kernels import gated_delta_rule

  y, state = gated_delta_rule(q, k, v, g=log_decay, beta=beta)
  # end

  assert y.shape == (2, 64, 4, 16)  # [batch, time, heads, value_dim]
  assert state.memory.shape == (2, 4, 16, 16)


def test_trellis():
  import functools

  import jax
  import jax.numpy as jnp

  from memcomp_kernels import trellis

  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
  target = jax.nn.softmax(jax.random.normal(jax.random.key(1), (2, 64, 4, 8)))
  g, rate = jnp.full((2, 64, 4), -0.1), jnp.full((2, 64, 4), 0.5)

  call = jax.jit(functools.partial(trellis, chunk_size=8))
  y, state = call(q, k, v, target=target, g=g, write_rate=rate)

  assert y.shape == (2, 64, 4, 16)
  assert state.key_memory.shape == (2, 4, 8, 16)  # 8 slots, as target has


def test_a_state_is_handed_on():
  import jax
  import jax.numpy as jnp

  from memcomp_kernels import linear_attention

  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
  call = jax.jit(linear_attention)

  y, state = call(q[:, :40], k[:, :40], v[:, :40])
  rest, state = call(q[:, 40:], k[:, 40:], v[:, 40:], state=state)

  whole, _ = call(q, k, v)
  assert jnp.allclose(jnp.concatenate([y, rest], axis=1), whole, atol=1e-5)


@pytest.mark.slow
def test_packed_rows():
  import functools

  import jax
  import jax.numpy as jnp

  from memcomp_kernels import FRESH, delta_rule

  q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 4, 16))
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  beta = jnp.full((1, 10, 4), 0.5)
  # Two documents and padding in a row.
  segment_ids = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]])

  call = jax.jit(functools.partial(delta_rule, reset_state=FRESH))
  y, state = call(q, k, v, beta=beta, segment_ids=segment_ids)
  assert jnp.all(y[:, 9] == 0)  # padding

  # The next tokens go on with document 2, then begin a third.
  more = jnp.array([[2, 2, 2, 3, 3, 3, 3, 3, 3, 3]])
  y_more, state = call(q, k, v, beta=beta, segment_ids=more, state=state)

  third, _ = call(q[:, 3:], k[:, 3:], v[:, 3:], beta=beta[:, 3:])
  assert jnp.allclose(y_more[:, 3:], third, atol=1e-5)


def test_an_implementation_is_chosen():
  import jax
  import jax.numpy as jnp

  from memcomp_kernels import linear_attention

  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 16))

  call = jax.jit(linear_attention, static_argnames="implementation")

  # The TPU kernel where it can run, else plain JAX.
  y, _ = call(q, k, v, implementation=("mosaic_tpu", "xla_chunked"))

  # The definition, token by token.
  expected, _ = call(q, k, v, implementation="reference")
  assert jnp.allclose(y, expected, atol=1e-5)


@pytest.mark.slow
def test_a_gradient():
  import jax
  import jax.numpy as jnp

  from memcomp_kernels import gated_delta_rule

  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 16))
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  g, beta = jnp.full((2, 16, 4), -0.1), jnp.full((2, 16, 4), 0.5)
  _, state = jax.jit(gated_delta_rule)(q, k, v, g, beta)

  def loss(arrays, memory):
    y, _ = gated_delta_rule(**arrays, state=state._replace(memory=memory))
    return jnp.mean(y**2)

  arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
  gradients, of_memory = jax.jit(jax.grad(loss, (0, 1)))(arrays, state.memory)

  assert gradients["beta"].shape == beta.shape
  assert of_memory.shape == state.memory.shape


@pytest.mark.slow
def test_token_by_token():
  import jax
  import jax.numpy as jnp

  from memcomp_kernels import delta_rule

  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 6, 4, 16))
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  beta = jnp.full((2, 6, 4), 0.5)
  call = jax.jit(delta_rule)
  _, state = call(q[:, :5], k[:, :5], v[:, :5], beta=beta[:, :5])

  # Decoding: a call of one token.
  y_t, state = call(q[:, 5:], k[:, 5:], v[:, 5:], beta=beta[:, 5:], state=state)

  y, _ = call(q, k, v, beta=beta)
  assert jnp.allclose(y_t, y[:, 5:], atol=1e-5)


@pytest.mark.slow
def test_an_op_in_equinox():
  import equinox as eqx
  import jax
  import jax.numpy as jnp

  from memcomp_kernels import gated_delta_rule

  class Memory(eqx.Module):
    project: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width, heads, *, key):
      self.project = eqx.nn.Linear(width, 3 * width + 2 * heads, key=key)
      self.heads = heads

    def __call__(self, x):  # [time, width]
      z = jax.vmap(self.project)(x)
      time, width = x.shape
      qkv, gates = z[:, : 3 * width], z[:, 3 * width :]
      q, k, v = jnp.moveaxis(qkv.reshape(1, time, 3, self.heads, -1), 2, 0)
      k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
      g, beta = jnp.moveaxis(gates.reshape(1, time, 2, self.heads), 2, 0)
      y, _ = gated_delta_rule(
        q, k, v, g=jax.nn.log_sigmoid(g), beta=jax.nn.sigmoid(beta)
      )
      return y.reshape(time, width)

  memory = Memory(32, heads=4, key=jax.random.key(0))
  rows = jax.random.normal(jax.random.key(1), (8, 16, 32))

  @eqx.filter_jit
  @eqx.filter_grad
  def gradient(memory, rows):
    return jnp.mean(jax.vmap(memory)(rows) ** 2)

  found = gradient(memory, rows)
  assert jnp.any(found.project.weight != 0)
