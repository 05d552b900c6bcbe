"""The slot attention layer: options, gates, bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import base, positions
from memcomp.layers import slot_attention as layers
from memcomp_kernels import slot_attention
from memcomp_kernels.testing import errors

SMALL = layers.SlotAttentionConfig(heads=2, key_dim=4, value_dim=6, num_slots=3)
BOUNDED = {
  "rule": "softmax",
  "scale": None,
  "silu_inputs": False,
  "rotary_dim": 4,
  "output_gate": True,
}


def build(**changes):
  config = dataclasses.replace(SMALL, **changes)
  return layers.SlotAttention.from_config(config, 8, std=0.3, rngs=nnx.Rngs(0))


def test_the_layer_repeats_the_kernels_defaults():
  assert layers.SlotAttentionConfig().spec() == slot_attention.Spec()


def test_decay_is_a_root_of_a_sigmoid():
  layer = build()
  x = jax.random.normal(jax.random.key(0), (2, 5, 8))
  inputs, _ = layer.inputs(x, layer.init_state(2), base.Call())
  expected = jax.nn.sigmoid(layer.control(x)).reshape(2, 5, 2, 3) ** 0.125
  np.testing.assert_allclose(jnp.exp(inputs.log_decay), expected, rtol=1e-5)
  expected = jax.nn.silu(layer.key(x)).reshape(2, 5, 2, 4)
  np.testing.assert_allclose(inputs.key, expected, rtol=1e-6)


def test_logits_are_clipped():
  layer = build(**BOUNDED, logit_limit=0.1)
  x = jax.random.normal(jax.random.key(0), (2, 5, 8))
  inputs, _ = layer.inputs(x, layer.init_state(2), base.Call())
  assert inputs.log_decay is None
  largest = jnp.abs(inputs.write_logit).max()
  np.testing.assert_allclose(largest, 0.1, rtol=1e-6)


def test_positions_count_in_the_segment():
  ids = jnp.array([[3, 3, 0, 3, 5, 5], [0, 0, 0, 0, 0, 0]])
  places, after = positions.advance(
    ids, jnp.array([3, 3]), jnp.array([4, 4]), 6
  )
  np.testing.assert_array_equal(
    places[0, jnp.array([0, 1, 3, 4, 5])], [4, 5, 6, 0, 1]
  )
  np.testing.assert_array_equal(after, [2, 4])


@pytest.mark.parametrize(
  "changes",
  rotation.cases(
    [{"convolution_width": 3}, {"output_gate": True}, BOUNDED],
    [{"convolution_width": 3}, BOUNDED],
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


@pytest.mark.slow
def test_packed_rows_of_bounded_memory_equal_their_segments():
  layer = build(**BOUNDED)
  a, b = jax.random.normal(jax.random.key(0), (2, 1, 5, 8))
  x = jnp.concatenate([a, 0 * a[:, :2], b], axis=1)
  ids = jnp.array([[4] * 5 + [0] * 2 + [2] * 5])
  y, final = layer(x, layer.init_state(1), segment_ids=ids)
  first, _ = layer(a, layer.init_state(1))
  second, last = layer(b, layer.init_state(1))
  errors.assert_close((y[:, :5], y[:, 7:]), (first, second), 1e-5)
  np.testing.assert_array_equal(final.position, last.position)


def test_state_and_flops_by_hand():
  # 2 heads, 3 slots, 4 + 6 columns; a write and a read of each.
  assert SMALL.state_floats(9) == 2 * 3 * 10
  assert SMALL.memory_flops(9) == 2 * 3 * 10 * 4
  bounded = dataclasses.replace(SMALL, **BOUNDED)
  assert bounded.state_floats(9) == 2 * 3 * 11


@pytest.mark.parametrize(
  "change",
  [
    {"rule": "mean"},
    {"num_slots": 0},
    {"heads": -1},
    {"gate_divisor": 0.0},
    {"logit_limit": 0.0},
    {"rotary_dim": 3},
    {"rotary_dim": 6},
    {"convolution_width": 1},
  ],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
