"""A model whose time is sharded is the same model."""

import dataclasses

import jax
import numpy as np
import pytest

from memcomp import config as config_lib
from memcomp import errors, sharding
from memcomp.data import batch as batch_lib
from memcomp.layers import registry
from memcomp.models import decoder
from memcomp.training import state as state_lib
from memcomp.training import step as step_lib
from memcomp.training import validate
from memcomp_kernels.testing import errors as kernel_errors
from memcomp_kernels.testing import tolerances

ROWS, TIME = 4, 32

SMALL = {"heads": 2, "key_dim": 8, "value_dim": 8}

# Between them: convolutions, token shifts, positions, values of the first
# layer, windows, memories handed over in a wavefront and combined.
MIXERS = {
  "trellis": {"num_slots": 4, "chunk_size": 8},
  "key_value_means": {"chunk_size": 4, "budget_rows": 8, "rotary_dim": 4},
  "rwkv7": {},
  "mamba2": {},
  "softmax_attention": {
    "window_size": 10,
    "rotary_dim": 4,
    "token_shift": True,
    "value_residual": "static",
  },
}


def make_config(name):
  config = config_lib.Config(name="context")
  config.model = decoder.DecoderConfig(
    vocab_size=32,
    d_model=16,
    num_layers=2,
    mlp_dim=16,
    mixers={"memory": registry.config_of(name)(**SMALL, **MIXERS[name])},
    embedding_convolution=3,
    channel_mixer="relu2_shift" if name == "rwkv7" else "swiglu",
    embedding_std=0.5,
    init_std=0.2,
    remat="memories",
  )
  config.data.sequence_length = TIME
  config.training.batch_size = ROWS
  config.training.loss_chunk = 8
  return config


def make_batch(packed):
  rng = np.random.default_rng(0)
  tokens, targets = rng.integers(0, 32, (2, ROWS, TIME), np.int32)
  ids = None
  if packed:
    # Documents within a shard of eight, over several, and padding.
    ids = np.repeat([[1, 2, 2, 3, 0]], ROWS, 0).repeat([3, 6, 12, 7, 4], 1)
    ids[1] = np.roll(ids[1], 5)
    # A shard of nothing but padding, with one document on both sides.
    ids[2] = np.repeat([1, 0, 1], [7, 10, 15])
    # A shard whose one token starts a document.
    ids[3] = np.repeat([1, 0, 2], [8, 7, 17])
  return batch_lib.Batch(tokens, targets, ids, None)


def loss_and_gradients(config, sizes, packed):
  devices = jax.devices()[: np.prod(list(sizes.values()), dtype=int)]
  mesh = sharding.make_mesh(config_lib.MeshConfig(**sizes), devices)
  batch = jax.device_put(make_batch(packed), sharding.batch_sharding(mesh))
  score = step_lib.make_validation_step(config)

  def loss(params):
    return score(params, batch, None)[0]["nll"]

  with jax.set_mesh(mesh):
    params = state_lib.initial_state(config, mesh).params
    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
  "name",
  [
    # It is combined; `test_time_shards` has a halo and a wavefront.
    pytest.param(name, marks=[pytest.mark.slow] * (name != "mamba2"))
    for name in MIXERS
  ],
)
def test_time_over_four_shards(name):
  config = make_config(name)
  packed = name not in ("mamba2", "softmax_attention")
  expected = loss_and_gradients(config, {}, packed)
  actual = loss_and_gradients(config, {"fsdp": 2, "context": 4}, packed)
  kernel_errors.assert_close(actual, expected, tolerances.SHARDED, name)


def test_rows_that_do_not_divide_over_time():
  config = make_config("trellis")
  config.data = dataclasses.replace(config.data, sequence_length=30)
  mesh = sharding.make_mesh(config_lib.MeshConfig(context=4), jax.devices()[:4])
  with pytest.raises(errors.UserError, match=r"30 tokens .*mesh.context = 4"):
    validate.check_mesh(config, mesh)
