import jax
import numpy as np
import pytest

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.data import store as store_lib
from memcomp.layers import trellis
from memcomp.models import decoder
from memcomp.training import state as state_lib


@pytest.fixture(autouse=True)
def quick_compiles():
  before = jax.config.values["jax_disable_most_optimizations"]
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


def tiny_config(**data) -> config_lib.Config:
  return config_lib.Config(
    name="tiny",
    seed=7,
    model=decoder.DecoderConfig(
      d_model=32,
      num_layers=2,
      mlp_dim=48,
      embedding_convolution=4,
      mixer=trellis.TrellisConfig(
        heads=2, key_dim=8, value_dim=8, num_slots=8, chunk_size=8
      ),
    ),
    data=config_lib.DataConfig(sequence_length=32, **data),
  )


def tiny_params(config: config_lib.Config):
  """Parameters from numpy: XLA takes long to compile JAX's generator."""
  rng = np.random.default_rng(config.seed)
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  shapes = state_lib.abstract_params(
    state_lib.abstract_model(config.model), mesh
  )
  return jax.tree.map(
    lambda x: jax.device_put(
      # Large enough that the state moves the logits.
      (0.3 * rng.standard_normal(x.shape)).astype(x.dtype),
      x.sharding,
    ),
    shapes,
  )


@pytest.fixture(scope="session")
def model() -> decoder.Decoder:
  config = tiny_config()
  graphdef = state_lib.abstract_model(config.model).graphdef
  return state_lib.merge(graphdef, tiny_params(config))


@pytest.fixture(scope="session")
def store() -> store_lib.ArrayStore:
  rng = np.random.default_rng(1)
  lengths = np.array([1, 300, 7, 512, 80])
  tokens = rng.integers(97, 123, lengths.sum()).astype(np.uint8)
  return store_lib.ArrayStore("letters", tokens, lengths)
