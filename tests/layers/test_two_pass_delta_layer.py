"""The two-pass delta layer: gates, read paths, slow levels, bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import base
from memcomp.layers import two_pass_delta as layers
from memcomp_kernels import two_pass_delta
from memcomp_kernels.testing import errors

SMALL = layers.TwoPassDeltaConfig(heads=2, key_dim=4, value_dim=6)


def build(**changes):
  config = dataclasses.replace(SMALL, **changes)
  return layers.TwoPassDelta.from_config(config, 8, std=0.3, rngs=nnx.Rngs(0))


def inputs_of(layer, time=7, ids=None):
  x = jax.random.normal(jax.random.key(0), (2, time, 8))
  return layer.inputs(x, layer.init_state(2), base.Call(ids))[0]


def test_the_layer_repeats_the_kernels_defaults():
  assert layers.TwoPassDeltaConfig().spec() == two_pass_delta.Spec()


@pytest.mark.parametrize("rate", [1e-6, 800.0])
def test_a_rate_of_any_size(rate):
  layer = build(rate_bound=0.0, code_rate=False, write_rate_init=rate)
  layer.gates[...] = 0 * layer.gates[...]
  found = inputs_of(layer).write_rate
  np.testing.assert_allclose(found, rate, rtol=1e-5)


def test_gates_at_the_start():
  layer = build(rate_bound=0.0, code_rate=False, write_rate_init=0.7)
  layer.gates[...] = 0 * layer.gates[...]
  inputs = inputs_of(layer)
  np.testing.assert_allclose(jnp.exp(inputs.log_decay), 0.982, rtol=1e-5)
  np.testing.assert_allclose(inputs.write_rate, 0.7, rtol=1e-5)
  assert inputs.active is None


def test_rates_are_bounded_and_divided():
  rate = inputs_of(build(rate_bound=0.0, code_rate=False)).write_rate[..., 0]
  bounded = inputs_of(build(rate_bound=0.5)).write_rate
  expected = 0.5 * rate / (0.5 + rate)
  np.testing.assert_allclose(bounded[..., 0], expected, rtol=1e-5)
  np.testing.assert_allclose(bounded[..., 1], expected / 4, rtol=1e-5)


def test_the_key_is_read():
  layer = build(read_path="key", normalize=False)
  inputs = inputs_of(layer)
  assert layer.query is None
  np.testing.assert_array_equal(inputs.query, inputs.key)


def test_slow_levels_count_in_the_segment():
  ids = jnp.array([[1, 1, 1, 0, 1, 2, 2], [3, 3, 3, 3, 3, 3, 3]])
  active = inputs_of(build(write_every=3), ids=ids).active[..., 0, 0]
  np.testing.assert_array_equal(
    active[0, jnp.array([0, 1, 2, 4, 5, 6])], [1, 0, 0, 1, 1, 0]
  )
  np.testing.assert_array_equal(active[1], [1, 0, 0, 1, 0, 0, 1])


@pytest.mark.parametrize(
  "changes",
  rotation.cases([{}, {"read_path": "key", "write_every": 2}], [{}]),
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
  # 2 heads; 4 x 4 and 4 x 6 numbers; four and three products.
  assert SMALL.state_floats(9) == 2 * (16 + 24)
  assert SMALL.memory_flops(9) == 2 * (4 * 2 * 16 + 3 * 2 * 24)


@pytest.mark.parametrize(
  "change",
  [
    {"code_eps": 0.0},
    {"heads": -1},
    {"write_every": 0},
    {"read_path": "value"},
    {"decay_init": 1.0},
    {"write_rate_init": 0.0},
    {"rate_bound": -1.0},
  ],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
