"""Trainer overhead: wall time of a step in the real loop, less the bare step.

  python benchmarks/trainer_overhead.py
  python benchmarks/trainer_overhead.py --asleep=1

Rounds of bare steps (one batch, the device never idle, nothing else done) and
of the whole trainer (data, metrics of every step written, checkpoints with
checksums), one program compiled once for both, in turns of changing order.
Prints the median and the mean of all steps, and of each round.

On a CPU the step and the host's work share the cores, so the loop also slows
the step down: an upper bound, and noisy. With --asleep=S a step computes
nothing but waits for S seconds, data, state, metrics and files being the same.
It frees the cores, as an accelerator's step does, but runs in the caller's
thread (steps with callbacks do, on a CPU): nothing overlaps, and what is left
over is all that the host does in a step. Also an upper bound, and less noisy.
"""

import contextlib
import io
import itertools
import os
import pathlib
import runpy
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.data import sources
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.training import feed as feed_lib
from memcomp.training import metrics as metrics_lib
from memcomp.training import run as run_lib
from memcomp.training import state as state_lib
from memcomp.training import step as step_lib

_ROUNDS = flags.DEFINE_integer("rounds", 4, "Of both, in turns.", 1)
_EVERY = flags.DEFINE_integer("checkpoint_every", 8, "Steps.", 1)
_CHECKPOINTS = flags.DEFINE_integer("checkpoints", 2, "Timed in a round.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 40, "Rows of 256 bytes.", 1)
_ASLEEP = flags.DEFINE_float("asleep", 0.0, "Seconds a step holds the device.")

_QUICKSTART = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.py"


def main(argv):
  del argv
  logging.set_verbosity(logging.WARNING)
  config = _config()
  program = _program(config)
  step_lib.jitted = lambda *unused: program
  print(
    f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, load"
    f" {os.getloadavg()[0]:.2f}; rows {_BATCH_SIZE.value} x"
    f" {config.data.sequence_length}"
  )
  kinds = {"bare": _bare, "loop": _loop}
  rounds: dict[str, list[list[float]]] = {"bare": [], "loop": []}
  for number in range(_ROUNDS.value):
    order = list(kinds) if number % 2 == 0 else list(kinds)[::-1]
    for name in order:
      rounds[name].append(kinds[name](config, program))
    bare, loop = (statistics.median(rounds[name][-1]) for name in kinds)
    print(
      f"round {number}: bare {bare:.4f} s, loop {loop:.4f} s,"
      f" {1e3 * (loop - bare):+.1f} ms, {(loop / bare - 1):+.2%}",
      flush=True,
    )
  for what in (statistics.median, statistics.fmean):
    bare, loop = (
      what(list(itertools.chain.from_iterable(rounds[name]))) for name in kinds
    )
    print(
      f"{what.__name__} of all: bare {bare:.4f} s, loop {loop:.4f} s,"
      f" {1e3 * (loop - bare):+.1f} ms, {(loop / bare - 1):+.2%}"
    )


def _config() -> config_lib.Config:
  """The quickstart's model; every step logged, a checkpoint now and then."""
  config = runpy.run_path(str(_QUICKSTART))["get_config"]()
  config.training.batch_size = _BATCH_SIZE.value
  # Timed from the first checkpoint, for which the loop waits for the device, to
  # the last: the saving of the first is in it, of the last is not.
  config.training.steps = _EVERY.value * (1 + _CHECKPOINTS.value)
  config.training.log_every = 1
  config.training.checkpoint_every = _EVERY.value
  config.optimizer.warmup_steps = 1
  config.evaluation.run_after_training = False
  return config


def _program(config: config_lib.Config) -> Any:
  """The jitted step that both time."""
  step = step_lib.jitted(config, sharding.make_mesh(config.mesh))
  if not _ASLEEP.value:
    return step

  def sleep(tokens):
    time.sleep(_ASLEEP.value)
    return np.zeros_like(tokens)

  def asleep(state, batch, request=None):
    shapes = jax.eval_shape(step, state, batch, request)[1]
    metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    tokens = batch.tokens.sum()
    slept = jax.pure_callback(sleep, jax.typeof(tokens), tokens)
    state = state._replace(step=state.step + 1 + slept)
    return state, metrics | {"step": state.step, "loss": slept.astype(float)}

  return jax.jit(asleep, donate_argnums=0)


def _bare(config: config_lib.Config, program: Any) -> list[float]:
  """Seconds between the ends of steps that follow one another at once."""
  mesh = sharding.make_mesh(config.mesh)
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  store = sources.open_split(config.data, "train", tokenizer=tokenizer)
  rows = config.training.batch_size
  with (
    jax.set_mesh(mesh),
    feed_lib.Feed(config, store, mesh, rows=rows, shuffle=True) as feed,
  ):
    batch, _ = next(feed)
    state = state_lib.initial_state(config, mesh)
    ends, before = [], None
    for _ in range(config.training.steps + 1):
      state, metrics = program(state, batch, None)
      if before is not None:
        before.block_until_ready()
        ends.append(time.perf_counter())
      before = metrics["loss"]
    jax.block_until_ready(state)
  return np.diff(ends)[_EVERY.value - 1 :].tolist()


def _loop(config: config_lib.Config, program: Any) -> list[float]:
  """Seconds of the same steps in `train.py`, by its own clock."""
  del program
  with (
    tempfile.TemporaryDirectory() as workdir,
    contextlib.redirect_stdout(io.StringIO()),
  ):
    assert run_lib.run(config, workdir) == 0
    records = metrics_lib.read(pathlib.Path(workdir) / metrics_lib.FILE)
  return [r["seconds_per_step"] for r in records if r["step"] > _EVERY.value]


if __name__ == "__main__":
  app.run(main)
