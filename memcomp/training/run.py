"""Training from a config to a checkpoint that has been evaluated."""

import contextlib
import importlib.metadata
import math
import pathlib
import sys
from typing import Any

import jax

from memcomp import config as config_lib
from memcomp import errors, sharding
from memcomp.data import sources
from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.models import decoder
from memcomp.training import (
  checkpoint,
  loop,
  plot,
  processes,
  signals,
  validate,
)
from memcomp.training import feed as feed_lib
from memcomp.training import state as state_lib
from memcomp.training import workdir as workdir_lib

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def run(config: config_lib.Config, workdir: str | pathlib.Path) -> int:
  """Trains, or goes on training, and evaluates.

  The same call goes on from the newest checkpoint of `workdir`; its losses are
  those of an uninterrupted run, bit for bit, on the same machine.

  Args:
    config: of the experiment.
    workdir: the run's directory (see `workdir`); made when absent.

  Returns:
    An exit code: 0 when finished, `errors.EXIT_RESUMABLE` when stopped by
    SIGTERM or Ctrl-C and saved, `errors.EXIT_DIVERGED` when the loss stopped
    being finite.

  Raises:
    UserError: bad config, data, workdir, checkpoint or disk.
  """
  workdir = pathlib.Path(workdir).absolute()
  with contextlib.ExitStack() as stack:
    with processes.together("opening the run"):
      validate.check(config)
      processes.check_same(config_lib.to_json(config))
      tokenizer = tokenizer_lib.load(config.data.tokenizer)
      validate.check_vocabulary(config, tokenizer.vocab_size)
      mesh = sharding.make_mesh(config.mesh)
      validate.check_mesh(config, mesh)
      workdir_lib.check(workdir, config)
      # Data before the folder is made: a mistake there should leave nothing.
      feed = stack.enter_context(_feed(config, tokenizer, mesh))
      store = _validation_store(config, tokenizer, mesh)
      if processes.is_first():
        stack.enter_context(workdir_lib.claim(workdir, config))
    code = _train(config, workdir, mesh, tokenizer, feed, store)
    processes.leave()
    if code == 0 and config.evaluation.run_after_training:
      code = _evaluate(config, workdir)
  return code


def _train(
  config: config_lib.Config,
  workdir: pathlib.Path,
  mesh: jax.sharding.Mesh,
  tokenizer: tokenizer_lib.Tokenizer,
  feed: feed_lib.Feed,
  store: store_lib.TokenStore | None,
) -> int:
  abstract = state_lib.abstract_state(config, mesh)
  meta = _meta(config, tokenizer, abstract)

  def check(saved: dict[str, Any]) -> None:
    _check_meta(saved, meta, config, workdir)

  with (
    jax.set_mesh(mesh),
    signals.StopRequest() as stop,
    contextlib.closing(
      checkpoint.Checkpoints(workdir, keep=config.training.keep_checkpoints)
    ) as checkpoints,
  ):
    restored = checkpoints.restore(abstract, check)
    if restored and restored.step >= config.training.steps:
      print(f"{workdir}: all {restored.step} steps are done", flush=True)
      return 0
    print(_describe(config, mesh, meta), flush=True)
    if restored:
      print(f"{workdir}: going on from step {restored.step}", flush=True)
    code = loop.train(
      loop.Run(config, workdir, mesh, tokenizer, feed, store, meta),
      restored,
      checkpoints,
      stop,
    )
  if code == 0 and processes.is_first():
    print(f"trained {config.training.steps} steps; saved in {workdir}")
    print(plot.loss_curve(workdir), flush=True)
  return code


def _feed(
  config: config_lib.Config,
  tokenizer: tokenizer_lib.Tokenizer,
  mesh: jax.sharding.Mesh,
) -> feed_lib.Feed:
  store = sources.open_split(config.data, "train", tokenizer=tokenizer)
  return feed_lib.Feed(
    config, store, mesh, rows=config.training.batch_size, shuffle=True
  )


def _validation_store(
  config: config_lib.Config,
  tokenizer: tokenizer_lib.Tokenizer,
  mesh: jax.sharding.Mesh,
) -> store_lib.TokenStore | None:
  """Opens what the validation loss needs, once, to find mistakes early."""
  if not config.training.evaluate_every:
    return None
  store = sources.open_split(config.data, "validation", tokenizer=tokenizer)
  rows = config.training.batch_size // config.training.accumulation
  with feed_lib.Feed(config, store, mesh, rows=rows, shuffle=False):
    return store


def _evaluate(config: config_lib.Config, workdir: pathlib.Path) -> int:
  # Imported late: training does not depend on evaluation.
  from memcomp.evaluation import run as evaluation_run

  try:
    evaluation_run.after_training(config, workdir)
  except KeyboardInterrupt:
    print(
      "\nCtrl-C: training is done and saved; the same command evaluates it",
      file=sys.stderr,
    )
    return errors.EXIT_RESUMABLE
  return 0


def _meta(
  config: config_lib.Config,
  tokenizer: tokenizer_lib.Tokenizer,
  abstract: state_lib.TrainState,
) -> dict[str, Any]:
  """Returns what is saved beside the arrays of a checkpoint, for JSON."""
  return {
    "config": config_lib.to_dict(config),
    "param_count": sum(
      math.prod(x.shape) for x in jax.tree.leaves(abstract.params)
    ),
    "tokenizer": tokenizer.fingerprint,
    "processes": jax.process_count(),
    "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
  }


def _check_meta(
  saved: dict[str, Any],
  mine: dict[str, Any],
  config: config_lib.Config,
  workdir: pathlib.Path,
) -> None:
  """Checks that a checkpoint is this run's."""
  workdir_lib.check_same(
    saved["config"], config, f"the checkpoint in {workdir}"
  )
  if saved["tokenizer"] != mine["tokenizer"]:
    raise errors.UserError(
      f"the checkpoint in {workdir} was trained with another tokenizer: "
      f"{config.data.tokenizer} has changed since; restore the file, or choose "
      "another --workdir"
    )
  if config.training.carry_state and saved["processes"] != mine["processes"]:
    raise errors.UserError(
      f"the checkpoint in {workdir} carries the states of rows that "
      f"{saved['processes']} processes held, now there are "
      f"{mine['processes']}; resume with as many"
    )


def _describe(
  config: config_lib.Config, mesh: jax.sharding.Mesh, meta: dict[str, Any]
) -> str:
  training = config.training
  tokens = training.batch_size * config.data.sequence_length
  devices = mesh.devices.flat
  axes = " ".join(f"{k} {v}" for k, v in mesh.shape.items() if v > 1)
  state_bytes = decoder.state_bytes(config.model, config.data.sequence_length)
  return (
    f"{config.name}: {decoder.describe(config.model)}; "
    f"{meta['param_count']:,} parameters, "
    f"{state_bytes:,} bytes of state a sequence\n"
    f"{training.steps} steps of {tokens:,} tokens on {mesh.size} x "
    f"{devices[0].device_kind}{f' ({axes})' if axes else ''}"
  )
