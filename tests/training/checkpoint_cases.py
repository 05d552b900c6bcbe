"""Checkpoints written and read, for the tests of them."""

import jax.numpy as jnp
import pytest

from memcomp import config as config_lib
from memcomp.training import checkpoint, state

MARKS = [
  pytest.mark.usefixtures("leaky_model"),
  # A read that fails leaves tensorstore's callbacks without their event loop.
  pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def save(folder, config, start, *steps, keep=3):
  manager = checkpoint.Checkpoints(folder, keep=keep)
  for step in steps:
    numbered = start._replace(step=jnp.int32(step))
    manager.save(step, numbered, {"place": step}, meta_of(config))
  manager.close()


def meta_of(config):
  return {"config": config_lib.to_dict(config)}


def restore(folder, config, mesh, check=lambda meta: None):
  manager = checkpoint.Checkpoints(folder, keep=3)
  try:
    return manager.restore(state.abstract_state(config, mesh), check)
  finally:
    manager.close()
