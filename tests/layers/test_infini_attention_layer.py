"""The Infini-attention layer: positions, gate, options, bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import base
from memcomp.layers import infini_attention as layers
from memcomp_kernels import infini_attention
from memcomp_kernels.testing import errors

SMALL = layers.InfiniAttentionConfig(
  heads=2, key_dim=4, value_dim=6, rotary_dim=4, segment_size=4
)


def build(**changes):
  config = dataclasses.replace(SMALL, **changes)
  return layers.InfiniAttention.from_config(
    config, 8, std=0.3, rngs=nnx.Rngs(0)
  )


def drawn(time=9):
  return jax.random.normal(jax.random.key(0), (2, time, 8))


def test_the_layer_repeats_the_kernels_defaults():
  assert layers.InfiniAttentionConfig().spec() == infini_attention.Spec()


def test_positions_are_of_local_attention_only():
  layer, x = build(), drawn()
  inputs, _ = layer.inputs(x, layer.init_state(2), base.Call())
  plain = (x @ layer.projection.query.kernel[...]).reshape(2, 9, 2, 4)
  np.testing.assert_allclose(inputs.memory_query, plain, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(inputs.query[:, 0], plain[:, 0], rtol=1e-5)
  assert jnp.any(jnp.abs(inputs.query[:, 1:] - plain[:, 1:]) > 0.01)
  turned, _ = build(rotate_memory=True).inputs(
    x, layer.init_state(2), base.Call()
  )
  np.testing.assert_array_equal(turned.query, inputs.query)
  assert turned.memory_query is None and turned.memory_key is None


def test_gate_is_one_number_a_head():
  layer = build(gate_init=0.25)
  layer.read_gate[...] = layer.read_gate[...].at[1].set(0.0)
  inputs, _ = layer.inputs(drawn(), layer.init_state(2), base.Call())
  np.testing.assert_allclose(inputs.read_gate[:, :, 0], 0.25, rtol=1e-6)
  np.testing.assert_allclose(inputs.read_gate[:, :, 1], 0.5, rtol=1e-6)


@pytest.mark.parametrize(
  "changes",
  rotation.cases(
    [
      {},
      {"rule": "linear", "window_size": 3, "rotate_memory": True},
      {"segment_size": 1, "window_size": 3, "normalize_key": "l2"},
    ],
    [{}],
  ),
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
  # 4 tokens of 4 + 6; memory and sum.
  assert SMALL.state_floats(9) == 2 * (4 * 10 + 4 * 7)
  token = dataclasses.replace(SMALL, segment_size=1, window_size=3)
  assert token.state_floats(9) == 2 * (3 * 10 + 4 * 7)
  # Segments of 4, 4 and 1 tokens: 21 pairs in 9 tokens; three products.
  assert SMALL.memory_flops(9) == round(2 * (2 * 10 * 21 / 9 + 6 * 24))
  # 1 + 2 + 7 * 3 pairs.
  assert token.memory_flops(9) == round(2 * (2 * 10 * 24 / 9 + 6 * 24))
  linear = dataclasses.replace(token, rule="linear")  # predicts nothing
  assert linear.memory_flops(9) == round(2 * (2 * 10 * 24 / 9 + 4 * 24))


@pytest.mark.parametrize(
  "change",
  [
    {"heads": -1},
    {"segment_size": 0},
    {"window_size": -1},
    {"rule": "outer"},
    {"rotary_dim": 3},
    {"gate_init": 1.0},
  ],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
