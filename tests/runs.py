"""Models with random weights, and checkpoints of them, without training."""

import contextlib

import jax
import numpy as np

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.models import abstract
from memcomp.runs import load
from memcomp.training import checkpoint
from memcomp.training import state as state_lib


def random_params(config: config_lib.Config, mesh=None):
  """Parameters from numpy: XLA takes long to compile JAX's generator."""
  rng = np.random.default_rng(config.seed)
  shapes = abstract.params_of(
    abstract.model_of(config.model), mesh or sharding.one_device()
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
  params = params or random_params(config)
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


def latest_step(path) -> int:
  """The newest step under a workdir."""
  root, _ = load.locate(path)
  return load.list_steps(root)[-1]
