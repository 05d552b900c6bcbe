"""Tokens per second of the training steps of several models."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from memcomp import config as config_lib
from memcomp import errors, sharding
from memcomp.data import batch as batch_lib
from memcomp.training import state as state_lib
from memcomp.training import step as step_lib


def training(
  configs: dict[str, config_lib.Config],
  *,
  rounds: int,
  steps: int = 3,
  progress: Callable[[], None] = lambda: None,
) -> dict[str, float]:
  """Times the training step of every config on random tokens.

  All are compiled first and then timed in turns, so that other load of the
  machine affects all of them. Weights are the initial ones.

  Args:
    configs: configs by name.
    rounds: number of turns for each, >= 1.
    steps: steps per turn.
    progress: called after each compilation and each turn.

  Returns:
    Tokens per second by name, the median over rounds.
  """
  turns = {}
  meshes = _meshes(configs)
  for name, config in configs.items():
    turns[name] = _turn(config, steps, meshes[name])
    turns[name]()
    progress()
  seconds: dict[str, list[float]] = {name: [] for name in configs}
  for _ in range(rounds):
    for name, turn in turns.items():
      start = time.perf_counter()
      turn()
      seconds[name].append(time.perf_counter() - start)
      progress()
  return {
    name: steps
    * config.training.batch_size
    * config.data.sequence_length
    / statistics.median(seconds[name])
    for name, config in configs.items()
  }


def _meshes(configs: dict[str, config_lib.Config]) -> dict[str, Mesh]:
  """Returns the mesh of each, or one device if here are too few for one."""
  try:
    return {k: sharding.make_mesh(c.mesh) for k, c in configs.items()}
  except errors.UserError:  # they were trained on another machine
    return dict.fromkeys(configs, sharding.one_device())


def _turn(
  config: config_lib.Config, steps: int, mesh: Mesh
) -> Callable[[], None]:
  """Returns a function that runs some steps and waits for them."""
  shape = config.training.batch_size, config.data.sequence_length
  tokens = np.random.default_rng(0).integers(
    0, config.model.vocab_size, shape, dtype=np.int32
  )
  batch: Any = batch_lib.Batch(
    tokens=tokens,
    targets=np.roll(tokens, -1, axis=1),
    segment_ids=np.ones(shape, np.int32),
    positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
  )
  if config.data.packing == "joined":  # like `training.feed`
    batch = batch._replace(segment_ids=None, positions=None)
  state = state_lib.initial_state(config, mesh)
  with jax.set_mesh(mesh):
    function = jax.jit(step_lib.make_train_step(config), donate_argnums=0)

  def turn():
    nonlocal state
    with jax.set_mesh(mesh):
      for _ in range(steps):
        state, _ = function(state, batch)
      jax.block_until_ready(state)

  return turn
