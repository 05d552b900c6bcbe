"""The OVQ layer: scores, steps, sizes, bad fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
from flax import nnx

from memcomp.layers import base
from memcomp.layers import ovq as layers
from memcomp_kernels import ovq
from memcomp_kernels.testing import errors

SMALL = layers.OVQConfig(
  heads=2, key_dim=4, value_dim=6, chunk_size=3, max_rows=5
)


def build(**changes):
  config = dataclasses.replace(SMALL, **changes)
  return layers.OVQ.from_config(config, 8, std=0.3, rngs=nnx.Rngs(0))


def test_the_layer_repeats_the_kernels_defaults():
  assert layers.OVQConfig().spec() == ovq.Spec()


def test_queries_have_length_beta_root_of_the_width():
  layer = build()
  layer.beta[...] = jnp.array([1.0, 3.0])
  x = jax.random.normal(jax.random.key(0), (2, 5, 8))
  inputs, _ = layer.inputs(x, layer.init_state(2), base.Call())
  length = jnp.linalg.norm(inputs.query, axis=-1)
  np.testing.assert_allclose(length[..., 0], 2, rtol=1e-4)
  np.testing.assert_allclose(length[..., 1], 6, rtol=1e-4)
  np.testing.assert_allclose(jnp.linalg.norm(inputs.key, axis=-1), 1, rtol=1e-4)


@pytest.mark.parametrize("shift", rotation.cases([False, True], [True]))
def test_steps_equal_the_sequence(shift):
  layer = build(token_shift=shift)
  x = jax.random.normal(jax.random.key(0), (2, 8, 8))
  y, final = jax.jit(layer)(x, layer.init_state(2))
  state, outputs, step = layer.init_state(2), [], jax.jit(layer.step)
  for t in range(8):
    out, state = step(x[:, t], state)
    outputs.append(out)
  errors.assert_close((jnp.stack(outputs, 1), state), (y, final), 1e-4)


def test_state_and_flops_by_hand():
  # 7 tokens: 6 of them in floor(30 / 11) = 2 rows of 4 + 6 and a count; a
  # chunk of 3.
  assert SMALL.state_floats(7) == 2 * (2 * 11 + 3 * 10)
  # Chunks see 0, floor(15 / 8) = 1 and 2 rows, twice; 1 to 3 tokens.
  assert SMALL.memory_flops(7) == 2 * 2 * 10 * (2 + 2)


@pytest.mark.parametrize(
  "change",
  [
    {"chunk_size": 0},
    {"max_rows": 0},
    {"growth": "log"},
    {"heads": -1},
    {"rotary_dim": 4},
  ],
  ids=str,
)
def test_bad_fields_are_named(change):
  (name,) = change
  with pytest.raises(ValueError, match=f"{name}="):
    build(**change)
