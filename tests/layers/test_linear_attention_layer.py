"""The linear attention layer: decays, norm, bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcomp.layers import base
from memcomp.layers import linear_attention as layers
from memcomp_kernels import linear_attention
from memcomp_kernels.testing import errors

SMALL = layers.LinearAttentionConfig(heads=2, key_dim=4, value_dim=6)


def build(**changes):
  config = dataclasses.replace(SMALL, **changes)
  return layers.LinearAttention.from_config(
    config, 8, std=0.3, rngs=nnx.Rngs(0)
  )


def log_decay(layer, x):
  inputs, _ = layer.inputs(x, layer.init_state(len(x)), base.Call())
  return inputs.log_decay


def drawn(time=9):
  return jax.random.normal(jax.random.key(0), (2, time, 8))


def test_the_layer_repeats_the_kernels_defaults():
  assert layers.LinearAttentionConfig().spec() == linear_attention.Spec()


def test_decays():
  x = drawn()
  assert log_decay(build(), x) is None
  head = log_decay(build(decay="head"), x)
  np.testing.assert_allclose(
    head[1, 3, :, 0], np.log([1 - 1 / 32, 1 - 1 / 64]), rtol=1e-5
  )
  layer = build(decay="token")
  layer.token_decay.bias[...] = jnp.array([1.0, -1.0])
  logit = x @ layer.token_decay.kernel[...] + jnp.array([1.0, -1.0])
  np.testing.assert_allclose(
    jnp.exp(log_decay(layer, x)[..., 0]),
    jax.nn.sigmoid(logit) ** (1 / 16),
    rtol=1e-5,
  )


def test_output_norm_is_per_head():
  layer, x = build(output_norm=True), drawn()
  y = jax.random.normal(jax.random.key(1), (2, 9, 2, 6))
  normed = y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-5)
  expected = normed.reshape(2, 9, 12) @ layer.out.kernel[...]
  np.testing.assert_allclose(
    layer.outputs(x, y), expected, rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"decay": "head", "feature_map": "identity", "normalize": False},
    {"decay": "token", "output_norm": True},
  ],
  ids=str,
)
def test_steps_equal_the_sequence(changes):
  layer, x = build(**changes), drawn(7)
  y, final = jax.jit(layer)(x, layer.init_state(2))
  state, outputs, step = layer.init_state(2), [], jax.jit(layer.step)
  for t in range(7):
    out, state = step(x[:, t], state)
    outputs.append(out)
  errors.assert_close((jnp.stack(outputs, 1), state), (y, final), 1e-4)


def test_state_and_flops_by_hand():
  assert SMALL.state_floats(9) == 2 * (4 * 6 + 4)
  assert SMALL.memory_flops(9) == 2 * 2 * 2 * (4 * 6 + 4)


@pytest.mark.parametrize(
  "change",
  [
    {"heads": -1},
    {"key_dim": -1},
    {"value_dim": -1},
    {"feature_map": "tanh"},
    {"decay": "some"},
  ],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
