"""What is random in training follows the seed and the step, nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation
import training_cases

from memcomp import sharding
from memcomp.data import batch as batch_lib
from memcomp.layers import tensor_cache
from memcomp.training import state, step


@pytest.mark.slow
@pytest.mark.parametrize("parts", rotation.cases([1, 2], [1]))
def test_noise_of_a_step(parts):
  config = training_cases.tiny(accumulation=parts)
  config.model.mixers["memory"] = tensor_cache.TensorCacheConfig(
    heads=2,
    key_dim=8,
    value_dim=8,
    rotary_dim=4,
    window_size=4,
    chunk_size=4,
    num_slots=4,
    read_gate_init=2.0,
    write_rate_init=0.9,
  )
  mesh = sharding.make_mesh(config.mesh)
  train_step = jax.jit(step.make_train_step(config))
  tokens = np.random.default_rng(0).integers(0, 250, (4, 17)).astype(np.int32)
  batch = batch_lib.Batch(
    tokens[:, :-1],
    tokens[:, 1:],
    np.ones((4, 16), np.int32),
    np.tile(np.arange(16, dtype=np.int32), (4, 1)),
  )
  first = state.initial_state(config, mesh)

  def loss(number):
    moved = first._replace(step=jnp.int32(number))
    with jax.set_mesh(mesh):
      return float(train_step(moved, batch)[1]["loss"])

  assert loss(3) == loss(3)
  assert loss(3) != loss(4)
