"""The Mamba2 layer: gates, initialisation, groups, a mesh, bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx
from jax.sharding import Mesh

from memcomp import sharding
from memcomp.layers import base, mamba2
from memcomp_kernels import state_space_duality
from memcomp_kernels.testing import errors

SMALL = mamba2.Mamba2Config(heads=4, key_dim=3, value_dim=6)


def build(**changes):
  config = dataclasses.replace(SMALL, **changes)
  return mamba2.Mamba2.from_config(config, 8, std=0.3, rngs=nnx.Rngs(0))


def drawn(time=9, batch=2):
  return jax.random.normal(jax.random.key(0), (batch, time, 8))


def test_heads_of_a_group_share():
  assert SMALL.spec() == state_space_duality.Spec(heads_per_group=4)
  assert build(groups=2).spec == state_space_duality.Spec(heads_per_group=2)


def test_inputs_are_the_published_ones():
  layer, x = build(groups=2), drawn()
  inputs, _ = layer.inputs(x, layer.init_state(2), base.Call())

  def convolved(projection, convolution, heads):
    padded = jnp.pad(x @ projection.kernel[...], ((0, 0), (3, 0), (0, 0)))
    taps = convolution.weight[...]
    y = sum(padded[:, j : j + 9] * taps[j] for j in range(4))
    y = jax.nn.silu(y + convolution.bias[...])
    return y.reshape(2, 9, heads, -1)

  for name, heads in (("query", 2), ("key", 2), ("value", 4)):
    expected = convolved(
      getattr(layer, name), getattr(layer, f"{name}_convolution"), heads
    )
    np.testing.assert_allclose(
      getattr(inputs, name), expected, rtol=1e-4, atol=1e-6, err_msg=name
    )
  step = jnp.logaddexp(
    x @ layer.step_logit.kernel[...] + layer.step_size.bias[...], 0.0
  )
  np.testing.assert_allclose(inputs.write_rate[..., 0], step, rtol=1e-4)
  A = -jnp.exp(layer.step_size.rate_log[...])
  np.testing.assert_allclose(inputs.log_decay[..., 0], step * A, rtol=1e-4)
  np.testing.assert_array_equal(inputs.skip, jnp.ones((2, 9, 4, 1)))


@pytest.mark.parametrize("groups", rotation.cases([1, 2], [2]))
def test_output_is_gated_then_normalised_by_group(groups):
  layer, x = build(groups=groups), drawn()
  y = jax.random.normal(jax.random.key(1), (2, 9, 4, 6))
  layer.norm.scale[...] = jnp.arange(1.0, 25.0)
  gated = y.reshape(2, 9, 24) * jax.nn.silu(x @ layer.gate.kernel[...])
  parts = gated.reshape(2, 9, groups, -1)
  parts = parts / jnp.sqrt(jnp.mean(parts**2, -1, keepdims=True) + 1e-5)
  expected = parts.reshape(2, 9, 24) * jnp.arange(1.0, 25.0)
  np.testing.assert_allclose(
    layer.outputs(x, y), expected @ layer.out.kernel[...], rtol=1e-4, atol=1e-4
  )


def test_initial_gates():
  layer = build(heads=64, value_dim=2)
  rate = np.exp(layer.step_size.rate_log[...])
  assert 1 <= rate.min() < 3 < 14 < rate.max() < 16
  step = np.logaddexp(layer.step_size.bias[...], 0)
  assert 1e-3 * 0.999 < step.min() < 2e-3 < 5e-2 < step.max() < 0.1001
  for drawn in (layer.value_convolution.weight, layer.value_convolution.bias):
    assert 0.45 < np.abs(drawn[...]).max() <= 0.5
  np.testing.assert_array_equal(layer.skip[...], np.ones(64))


@pytest.mark.parametrize(
  "changes", [{}, {"groups": 2, "convolution_width": 0}], ids=str
)
def test_steps_equal_the_sequence(changes):
  layer, x = build(**changes), drawn(7)
  y, final = jax.jit(layer)(x, layer.init_state(2))
  state, outputs, step = layer.init_state(2), [], jax.jit(layer.step)
  for t in range(7):
    out, state = step(x[:, t], state)
    outputs.append(out)
  errors.assert_close((jnp.stack(outputs, 1), state), (y, final), 1e-4)


@pytest.mark.parametrize("groups", rotation.cases([1, 2], [2]))
def test_groups_on_a_mesh_that_shards_heads(groups):
  """One group for two shards of heads is repeated."""
  layer, x = build(groups=groups), drawn(batch=4)
  graph, params = nnx.split(layer)

  def run(params, x):
    layer = nnx.merge(graph, params)
    return layer(x, layer.init_state(4))[0]

  sharding.use(layer, sharding.RULES)
  graph, _ = nnx.split(layer)
  expected = jax.jit(run)(params, x)
  assert sharding.RULES.shards("heads") == 1
  devices = np.array(jax.devices()[:8]).reshape(2, 2, 2, 1)
  with jax.set_mesh(Mesh(devices, sharding.AXES)):
    assert sharding.RULES.shards("heads") == 2
    found = jax.jit(run)(params, x)
  errors.assert_close(found, expected, 1e-5)


def test_state_and_flops_by_hand():
  assert SMALL.state_floats(9) == 4 * 3 * 6
  assert SMALL.memory_flops(9) == 4 * 2 * 2 * 3 * 6


@pytest.mark.parametrize(
  "change",
  [
    {"heads": -1},
    {"key_dim": -1},
    {"groups": 3},
    {"groups": 0},
    {"convolution_width": 1},
  ],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
