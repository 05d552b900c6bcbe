"""The validation loss during training."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from memcomp import config as config_lib
from memcomp.data import sources
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.models import abstract
from memcomp.training import feed as feed_lib
from memcomp.training import state as state_lib
from memcomp.training import step


def make(
  config: config_lib.Config,
  store: sources.Split,
  mesh: jax.sharding.Mesh,
  token_bytes: np.ndarray | None = None,
) -> Callable[[Any], dict[str, float | None]]:
  """Returns params -> validation_loss (nats per token) and bits per byte.

  For a task, where an answer counts as a byte, also validation_accuracy: the
  share of right answers. All are None if no token was scored.

  It is the mean over the scored tokens of the first `evaluate_batches` batches
  of `batch_size` rows, always the same ones, in micro-batches of training's
  size. With `carry_state`, the state is carried between them, too; otherwise,
  also with `state_passing`, every row starts from a fresh state.
  """
  model = abstract.model_of(config.model)
  training = config.training
  rows = training.batch_size // training.accumulation
  count = training.evaluate_batches * training.accumulation
  run = jax.jit(
    step.make_validation_step(config, token_bytes), donate_argnums=2
  )
  fresh = jax.jit(
    lambda params: state_lib.initial_carry(config, model, params, rows),
    out_shardings=state_lib.carry_shardings(config, model, mesh),
  )

  def validation_loss(params):
    sums, carry = [], fresh(params) if training.carry_state else None
    with feed_lib.Feed(config, store, mesh, rows=rows, shuffle=False) as feed:
      for batch, _ in itertools.islice(feed, count):
        part, carry = run(params, batch, carry)
        sums.append(part)
    parts = jax.device_get(sums)
    nats, tokens, size, right = (
      sum(float(part[name]) for part in parts)
      for name in ("nll", "tokens", "bytes", "right")
    )
    found = {
      "validation_loss": nats / tokens if tokens else None,
      "validation_bits_per_byte": tokenizer_lib.bits_per_byte(nats, int(size)),
    }
    if config.data.task is not None:
      found["validation_accuracy"] = right / tokens if tokens else None
    return found

  return validation_loss
