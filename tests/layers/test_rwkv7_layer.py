"""The RWKV-7 layer: gates, the first layer's value, bad fields."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memcomp.layers import base
from memcomp.layers import rwkv7 as layers
from memcomp_kernels import rwkv7
from memcomp_kernels.testing import errors

SMALL = layers.RWKV7Config(heads=2, key_dim=4, value_dim=6)


def build(**changes):
  config = dataclasses.replace(SMALL, **changes)
  layer = layers.RWKV7.from_config(config, 8, std=0.3, rngs=nnx.Rngs(0))
  layer.at_depth(jnp.array(0.25), 4)
  # Away from zero, where low-rank maps start.
  for name in ("decay", "rate", "gate", "value_share"):
    module = getattr(layer, name)
    if module is not None:
      module.down.kernel[...] = 0.3 * jnp.sin(
        jnp.arange(module.down.kernel[...].size, dtype=jnp.float32)
      ).reshape(module.down.kernel[...].shape)
  return layer


def context_of(layer, x, ids=None):
  return base.Call(segment_ids=ids, first_value=layer.value_of(x))


def some_x(time=7):
  return jax.random.normal(jax.random.key(0), (2, time, 8))


def test_the_layer_repeats_the_kernels_defaults():
  assert layers.RWKV7Config().spec() == rwkv7.Spec()


def test_ranks_of_the_released_sizes():
  config = layers.RWKV7Config().at_width(768)
  # 768: 2.5 sqrt(768) = 69.3, 1.7 sqrt(768) = 47.1, 5 sqrt(768) = 138.6.
  assert config.ranks(768) == {
    "decay": 64,
    "rate": 64,
    "value": 32,
    "gate": 128,
  }
  assert dataclasses.replace(config, gate_rank=7).ranks(768)["gate"] == 7


def test_starts_by_depth_are_the_released_ones():
  """Of layer 2 of 4, channels 0, 3 and 7; first and last layers."""
  layer = build()
  layer.at_depth(jnp.array(2 / 4), 4)
  np.testing.assert_allclose(layer.norm_scale[...], 0.75**0.7, rtol=1e-6)
  power = 1 + (2 / 3) ** 0.3
  zigzag = np.array([-1, 1, 1])  # of heads of four channels
  expected = -6 + 6 * (np.array([0, 3, 7]) / 7) ** power + 0.5 + 2.5 * zigzag
  bias = layer.decay.bias[...][jnp.array([0, 3, 7])]
  np.testing.assert_allclose(bias, expected, rtol=1e-5)
  for depth, layers_, scale, power in ((0, 4, 0.25**0.7, 1), (0.75, 4, 1, 2)):
    layer.at_depth(jnp.array(depth), layers_)
    np.testing.assert_allclose(layer.norm_scale[...], scale, rtol=1e-6)
    bias = -6 + 6 * (3 / 7) ** power + 0.5 + 2.5
    np.testing.assert_allclose(layer.decay.bias[...][3], bias, rtol=1e-5)


@jax.numpy_dtype_promotion("strict")
def test_a_layer_in_bfloat16_keeps_its_dtype_by_depth():
  layer = build()
  graphdef, parameters = nnx.split(layer)
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters)
  layer = nnx.merge(graphdef, narrow)
  layer.at_depth(jnp.float32(0.5), 4)
  assert jax.tree.all(
    jax.tree.map(lambda x: x.dtype == jnp.bfloat16, nnx.state(layer, nnx.Param))
  )


def test_inputs_by_the_formulas():
  """Written out with shifted tokens, one after the other."""
  layer, x = build(value_residual="none"), some_x()
  inputs, _ = layer.inputs(x, layer.init_state(2), base.Call())
  before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]

  def mixed(name):
    amount = layer.shifts[name].amount[...]
    return (1 - amount) * x + amount * before

  def low_rank(module, x, f=lambda x: x):
    return f(x @ module.down.kernel[...]) @ module.up.kernel[...]

  def heads(x):
    return x.reshape(2, 7, 2, -1)

  rate = jax.nn.sigmoid(
    low_rank(layer.rate, mixed("rate")) + layer.rate.bias[...]
  )
  decay = (
    low_rank(layer.decay, mixed("decay"), jnp.tanh) + layer.decay.bias[...]
  )
  key = mixed("key") @ layer.key.kernel[...]
  removal = heads(key * layer.removal[...])
  removal = removal / jnp.linalg.norm(removal, axis=-1, keepdims=True)
  expected = rwkv7.Inputs(
    query=heads(mixed("query") @ layer.query.kernel[...]),
    key=heads(key * (1 + (rate - 1) * 1.02)),
    value=heads(mixed("value") @ layer.value.kernel[...]),
    removal_key=removal,
    log_decay=heads(-math.exp(-0.5) * jax.nn.sigmoid(decay)),
    write_rate=heads(rate),
  )
  errors.assert_close(inputs, expected, 1e-5)
  expected = low_rank(layer.gate, mixed("gate"), jax.nn.sigmoid)
  found = layer.gate(mixed("gate"))
  errors.assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_layer_adds_its_value_to_itself(packed):
  """With its token shift: the share, whatever it is, changes nothing."""
  ids = jnp.array([[1, 1, 2, 2, 0, 2, 3]] * 2) if packed else None
  layer, x = build(), some_x()
  inputs, _ = layer.inputs(x, layer.init_state(2), context_of(layer, x, ids))
  plain = build(value_residual="none")
  expected, _ = plain.inputs(x, plain.init_state(2), base.Call(segment_ids=ids))
  real = np.ones(7, bool) if ids is None else np.asarray(ids[0] != 0)
  errors.assert_close(inputs.value[:, real], expected.value[:, real], 1e-5)
  other = context_of(layer, x + 1, ids)
  moved, _ = layer.inputs(x, layer.init_state(2), other)
  assert jnp.any(jnp.abs(moved.value - inputs.value) > 0.01)


@pytest.mark.slow
def test_output_by_the_formula():
  layer, x = build(value_residual="none"), some_x()
  state = layer.init_state(2)
  inputs, _ = layer.inputs(x, state, base.Call())
  before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  amount = layer.shifts["gate"].amount[...]
  gate = layer.gate(x + amount * (before - x))
  _, p = rwkv7.reference(state.memory, inputs, spec=layer.spec)
  centred = p - p.mean(-1, keepdims=True)
  normed = centred / jnp.sqrt(p.var(-1, keepdims=True) + 4e-5)
  normed *= (2 / 4) ** 0.7  # the second layer of four, as `build` says
  bonus = (inputs.query * inputs.key * -0.04).sum(-1, keepdims=True)
  y = (normed + bonus * inputs.value).reshape(2, 7, -1) * gate
  got, _ = layer(x, state)
  errors.assert_close(got, y @ layer.out.kernel[...], 1e-4)


def test_steps_equal_the_sequence():
  layer, x = build(), some_x()
  first = layer.value_of(x)
  y, final = jax.jit(layer)(x, layer.init_state(2), first_value=first)
  state, outputs, step = layer.init_state(2), [], jax.jit(layer.step)
  for t in range(7):
    out, state = step(x[:, t], state, first_value=first[:, t])
    outputs.append(out)
  errors.assert_close((jnp.stack(outputs, 1), state), (y, final), 1e-4)


def test_state_and_flops_by_hand():
  # 2 heads of 4 x 6; removed, two writes, read.
  assert SMALL.state_floats(9) == 2 * 24
  assert SMALL.memory_flops(9) == 2 * 24 * 2 * 4


@pytest.mark.parametrize(
  "change",
  [
    {"scale": 0.0},
    {"heads": -1},
    {"value_residual": "scalar"},
    {"gate_rank": -1},
  ],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
