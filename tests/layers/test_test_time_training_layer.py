"""The test-time training layer: options, shares of a step, bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import base
from memcomp.layers import test_time_training as layers
from memcomp_kernels import ttt
from memcomp_kernels.testing import errors

SMALL = layers.TestTimeTrainingConfig(
  heads=2, key_dim=4, value_dim=4, rotary_dim=2, chunk_size=4
)


def build(**changes):
  config = dataclasses.replace(SMALL, **changes)
  return layers.TestTimeTraining.from_config(
    config, 8, std=0.3, rngs=nnx.Rngs(0)
  )


def test_the_layer_repeats_the_kernels_defaults():
  assert layers.TestTimeTrainingConfig().spec() == ttt.Spec()


def test_steps_average_inside_chunks_of_each_segment():
  layer = build()
  layer.step_offset[...] = jnp.array([0.0, 0.5, -0.5, 0.0])
  x = jax.random.normal(jax.random.key(0), (1, 8, 8))
  ids = jnp.array([[1, 1, 1, 0, 1, 1, 2, 2]])
  inputs, _ = layer.inputs(x, layer.init_state(1), base.Call(ids))
  places = np.array([0, 1, 2, 4, 5, 6, 7])  # not the padding
  np.testing.assert_allclose(
    inputs.step_scale[0, places, 1, 0], [1, 1, 0, 0.25, 1, 1, 1], atol=1e-7
  )


def test_rate_at_the_start_is_divided_by_the_width():
  layer = build(write_rate_init=0.05, write_rate_scale=0.1)
  inputs, _ = layer.inputs(
    jnp.zeros((1, 3, 8)), layer.init_state(1), base.Call()
  )
  np.testing.assert_allclose(inputs.write_rate, 0.05 / 4, rtol=1e-6)


@pytest.mark.parametrize(
  "changes",
  rotation.cases(
    [
      {"model": "mlp", "gradient_at": "token", "forget_gate": True},
      {"model": "mlp", "convolution_width": 3, "average_step": False},
    ],
    [{"model": "mlp", "convolution_width": 3, "average_step": False}],
  ),
  ids=str,
)
def test_steps_equal_the_sequence(changes):
  layer = build(**changes)
  x = jax.random.normal(jax.random.key(0), (2, 7, 8))
  y, final = jax.jit(layer)(x, layer.init_state(2))
  state, outputs, step = layer.init_state(2), [], jax.jit(layer.step)
  for t in range(7):
    out, state = step(x[:, t], state)
    outputs.append(out)
  errors.assert_close((jnp.stack(outputs, 1), state), (y, final), 1e-4)


def test_state_and_flops_by_hand():
  # 2 heads; 4 x 4 weights and 4 biases; six products, two score matrices.
  assert SMALL.state_floats(9) == 2 * (16 + 4)
  assert SMALL.memory_flops(9) == 2 * (6 * 16 + 2 * 4 * 8)
  mlp = dataclasses.replace(SMALL, model="mlp", gradient_at="token")
  assert mlp.state_floats(9) == 2 * (4 * 16 + 16 + 16 * 4 + 4)
  assert mlp.memory_flops(9) == 2 * (6 * 128 + 2 * 64)


@pytest.mark.parametrize(
  "change",
  [
    {"model": "cnn"},
    {"heads": -1},
    {"value_dim": 8},
    {"decay_init": 0.0},
    {"write_rate_init": 1.0},
    {"rotary_dim": 3},
    {"rotary_dim": 6},
    {"weight_std": 0.0},
    {"convolution_width": 1},
  ],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
