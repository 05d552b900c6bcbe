"""A tiny model, text and checkpoint for the tests of evaluation."""

import contextlib

import jax
import numpy as np

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.layers import trellis
from memcomp.models import decoder
from memcomp.training import checkpoint
from memcomp.training import state as state_lib


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


def save(workdir, config, step: int, *, params=None, **meta) -> None:
  """Writes a checkpoint as training does."""
  params = params or tiny_params(config)
  number = jax.numpy.int32(step)
  state = state_lib.TrainState(
    params, {"count": number}, number, number, number, None
  )
  meta = {
    "config": config_lib.to_dict(config),
    "param_count": sum(x.size for x in jax.tree.leaves(params)),
    "tokenizer": tokenizer_lib.ByteTokenizer().fingerprint,
  } | meta
  with contextlib.closing(
    checkpoint.Checkpoints(workdir, keep=9)
  ) as checkpoints:
    checkpoints.save(step, state, {}, meta)


def write_text(folder) -> str:
  """Writes some documents; returns the folder as a source."""
  folder.mkdir()
  for number in range(30):
    lines = [f"line {i} of document {number}\n" for i in range(10 + number)]
    (folder / f"{number}.txt").write_text("".join(lines))
  return str(folder)
