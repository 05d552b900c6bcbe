import jax
import numpy as np
import pytest

from memcomp import sharding
from memcomp.config import MeshConfig
from memcomp.layers import trellis
from memcomp.models import decoder
from memcomp.training import state as state_lib


@pytest.fixture(scope="session")
def model() -> decoder.Decoder:
  """Random weights from numpy: XLA takes long to compile JAX's generator."""
  config = decoder.DecoderConfig(
    d_model=32,
    num_layers=2,
    mlp_dim=48,
    embedding_convolution=4,
    mixer=trellis.TrellisConfig(
      heads=2, key_dim=8, value_dim=8, num_slots=8, chunk_size=8
    ),
  )
  rng = np.random.default_rng(0)
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  abstract = state_lib.abstract_model(config)
  params = jax.tree.map(
    lambda x: jax.device_put(
      (0.3 * rng.standard_normal(x.shape)).astype(x.dtype), x.sharding
    ),
    state_lib.abstract_params(abstract, mesh),
  )
  return state_lib.merge(abstract.graphdef, params)
