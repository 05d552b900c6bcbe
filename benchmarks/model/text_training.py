"""Training small models on text, for the benchmarks that compare variants."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import runpy
from typing import Any

import jax
import numpy as np
from absl import logging
from recall_training import stack

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.data import sources
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.training import feed as feed_lib
from memcomp.training import state as state_lib
from memcomp.training import step as step_lib

_VALIDATION_STRIDE = 6  # one batch in so many is scored: 71 of 427
_QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
  """What is kept of a run.

  Attributes:
    bits_per_byte: on a fixed share of the validation files.
    scored_bytes: of those.
    losses: nats per byte, of every update.
    grad_norms: of every update, before clipping.
    skipped: updates that were not finite.
    params: at the end.
  """

  bits_per_byte: float
  scored_bytes: int
  losses: np.ndarray
  grad_norms: np.ndarray
  skipped: int
  params: Any


def quickstart(seed: int, steps: int) -> config_lib.Config:
  """The quickstart's model and data, with AdamW and fresh windows alone.

  The ablations were measured so.
  """
  config = runpy.run_path(str(_QUICKSTART))["get_config"]()
  config.optimizer.name = "adamw"
  config.training.state_passing = 0.0
  config.seed = config.data.seed = seed
  config.training.steps = steps
  config.optimizer.warmup_steps = max(1, round(0.03 * steps))
  return config


def train(configs: list[config_lib.Config]) -> list[Trained]:
  """Trains configurations that differ in their seeds alone.

  All side by side, one more axis of every array: small products cost little
  more for several seeds than for one, and seeds do not meet anywhere.
  """
  config = configs[0]
  mesh = sharding.make_mesh(config.mesh)
  tokenizer = tokenizer_lib.load(config.data.tokenizer)

  def feed(config, split):
    store = sources.open_split(config.data, split, tokenizer=tokenizer)
    return feed_lib.Feed(
      config,
      store,
      mesh,
      rows=config.training.batch_size,
      shuffle=split == "train",
    )

  with jax.set_mesh(mesh):
    state = stack([state_lib.initial_state(c, mesh) for c in configs])
    update = jax.jit(
      jax.vmap(step_lib.make_train_step(config)), donate_argnums=0
    )
    history = []
    with contextlib.ExitStack() as opened:
      feeds = [opened.enter_context(feed(c, "train")) for c in configs]
      for number in range(config.training.steps):
        batch = stack([next(f)[0] for f in feeds])
        state, measured = update(state, batch)
        history.append(
          [measured[name] for name in ("loss", "grad_norm", "skipped")]
        )
        if (number + 1) % 50 == 0:
          logging.info("update %d: loss %s", number + 1, measured["loss"])
    score = jax.jit(
      jax.vmap(step_lib.make_validation_step(config), in_axes=(0, None, None))
    )
    with feed(config, "validation") as batches:
      scored = [
        score(state.params, batch, None)[0]
        for batch, _ in itertools.islice(batches, 0, None, _VALIDATION_STRIDE)
      ]
  add = functools.partial(jax.tree.map, lambda *x: np.sum(x, axis=0))
  sums = add(*jax.device_get(scored))
  losses, norms, skipped = np.array(jax.device_get(history)).transpose(1, 2, 0)
  params = jax.device_get(state.params)
  return [
    Trained(
      bits_per_byte=tokenizer_lib.bits_per_byte(
        float(sums["nll"][i]), int(sums["bytes"][i])
      ),
      scored_bytes=int(sums["bytes"][i]),
      losses=losses[i],
      grad_norms=norms[i],
      skipped=int(skipped[i, -1]),
      params=jax.tree.map(lambda x, i=i: x[i], params),
    )
    for i in range(len(configs))
  ]
