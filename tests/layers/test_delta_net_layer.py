"""The DeltaNet layers: gates, initialisation, options, bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import base, delta_net
from memcomp_kernels import delta_rule
from memcomp_kernels.testing import errors

SMALL = delta_net.GatedDeltaNetConfig(heads=2, key_dim=4, value_dim=6)
PLAIN = delta_net.DeltaNetConfig(heads=2, key_dim=4, value_dim=6)


def build(config=SMALL, **changes):
  config = dataclasses.replace(config, **changes)
  gated = isinstance(config, delta_net.GatedDeltaNetConfig)
  layer = delta_net.GatedDeltaNet if gated else delta_net.DeltaNet
  return layer.from_config(config, 8, std=0.3, rngs=nnx.Rngs(0))


def drawn(time=9):
  return jax.random.normal(jax.random.key(0), (2, time, 8))


def test_the_layer_repeats_the_kernels_defaults():
  assert delta_net.GatedDeltaNetConfig().spec() == delta_rule.Spec()
  assert delta_net.DeltaNetConfig().spec() == delta_rule.Spec(forget_gate=False)


def test_inputs_are_the_published_ones():
  layer, x = build(negative_eigenvalues=True), drawn()
  inputs, _ = layer.inputs(x, layer.init_state(2), base.Call())

  def convolved(projection, convolution):
    padded = jnp.pad(x @ projection.kernel[...], ((0, 0), (3, 0), (0, 0)))
    taps = convolution.weight[...]
    y = sum(padded[:, j : j + 9] * taps[j] for j in range(4))
    return jax.nn.silu(y).reshape(2, 9, 2, -1)

  value = convolved(layer.value, layer.value_convolution)
  np.testing.assert_allclose(inputs.value, value, rtol=1e-4, atol=1e-6)
  for name in ("query", "key"):
    y = convolved(getattr(layer, name), getattr(layer, f"{name}_convolution"))
    y = y / jnp.sqrt(jnp.sum(y**2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(
      getattr(inputs, name), y, rtol=1e-4, atol=1e-6, err_msg=name
    )
  rate = 2 / (1 + jnp.exp(-x @ layer.write_rate.kernel[...]))
  np.testing.assert_allclose(inputs.write_rate[..., 0], rate, rtol=1e-5)
  step = jnp.logaddexp(
    x @ layer.decay_step.kernel[...] + layer.decay.bias[...], 0.0
  )
  log_decay = -jnp.exp(layer.decay.rate_log[...]) * step
  np.testing.assert_allclose(inputs.log_decay[..., 0], log_decay, rtol=1e-4)


def test_output_is_normalised_per_head_and_gated():
  layer, x = build(), drawn()
  y = jax.random.normal(jax.random.key(1), (2, 9, 2, 6))
  layer.norm.scale[...] = jnp.arange(1.0, 7.0)
  heads = y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-5)
  heads = (heads * jnp.arange(1.0, 7.0)).reshape(2, 9, 12)
  expected = heads * jax.nn.silu(x @ layer.gate.kernel[...])
  np.testing.assert_allclose(
    layer.outputs(x, y), expected @ layer.out.kernel[...], rtol=1e-4, atol=1e-5
  )


def test_the_eps_of_the_norm_is_an_option():
  layer, x = build(norm_eps=3.0, output_gate=False), drawn()
  y = jnp.ones((2, 9, layer.heads, layer.value_dim))
  expected = jnp.full((2, 9, layer.heads * layer.value_dim), 0.5)
  np.testing.assert_allclose(
    layer.outputs(x, y), expected @ layer.out.kernel[...], rtol=1e-5, atol=1e-6
  )


def test_initial_decays_and_convolutions():
  layer = build(heads=64, key_dim=2, value_dim=2)
  rate = np.exp(layer.decay.rate_log[...])
  assert 0 < rate.min() < 2 < 14 < rate.max() < 16
  step = np.logaddexp(layer.decay.bias[...], 0)
  assert 1e-3 * 0.999 < step.min() < 2e-3 < 5e-2 < step.max() < 0.1001
  weight = np.abs(layer.key_convolution.weight[...])
  assert 0.45 < weight.max() <= 0.5
  assert layer.key_convolution.bias is None


def test_delta_net_has_no_gates():
  layer = build(PLAIN)
  assert layer.gate is None and layer.decay is None
  inputs, _ = layer.inputs(drawn(), layer.init_state(2), base.Call())
  np.testing.assert_array_equal(inputs.log_decay, 0 * inputs.write_rate)


@pytest.mark.parametrize("config", [SMALL, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize("width", rotation.cases([0, 3], [3]))
def test_steps_equal_the_sequence(config, width):
  layer, x = build(config, convolution_width=width), drawn(7)
  y, final = jax.jit(layer)(x, layer.init_state(2))
  state, outputs, step = layer.init_state(2), [], jax.jit(layer.step)
  for t in range(7):
    out, state = step(x[:, t], state)
    outputs.append(out)
  errors.assert_close((jnp.stack(outputs, 1), state), (y, final), 1e-4)


def test_state_and_flops_by_hand():
  assert SMALL.state_floats(9) == 2 * 4 * 6
  assert SMALL.memory_flops(9) == 2 * 6 * 4 * 6


@pytest.mark.parametrize(
  "change",
  [{"heads": -1}, {"key_dim": -1}, {"value_dim": -1}, {"convolution_width": 1}],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
