"""Training from a config to an evaluated checkpoint."""

import contextlib
import math
import pathlib
import sys
from typing import Any

import jax
from etils import epath

from memcomp import config as config_lib
from memcomp import disk, errors, paths, platforms, sharding
from memcomp.data import chat_template, sources
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.models import overview
from memcomp.runs import claims, load
from memcomp.runs import workdir as workdir_lib
from memcomp.training import (
  checkpoint,
  faults,
  loop,
  metrics,
  plot,
  processes,
  signals,
  validate,
)
from memcomp.training import feed as feed_lib
from memcomp.training import state as state_lib


def run(
  config: config_lib.Config,
  workdir: str | pathlib.Path,
  checkpoints: str = "",
) -> int:
  """Trains or resumes a run, and evaluates it.

  The same call resumes from the newest checkpoint. Its losses equal those of an
  uninterrupted run, bit for bit, on the same machine.

  Args:
    config: config of the experiment.
    workdir: folder of the run (see `workdir`); created if missing.
    checkpoints: folder of the checkpoints, also gs://BUCKET/FOLDER; "" is
      `workdir`.

  Returns:
    An exit code: 0 when finished, `errors.EXIT_RESUMABLE` when saved because a
    signal (`signals.NAMES`) came or nothing reads the output any more,
    `errors.EXIT_DIVERGED` when the loss stopped being finite.

  Raises:
    UserError: bad config, data, workdir, checkpoint or disk.
  """
  if paths.is_remote(str(workdir)):
    raise errors.UserError(
      f"--workdir={workdir}: a bucket has no locks and no appends, which a"
      " run's folder needs; keep it on this machine and give"
      f" --checkpoints={workdir} instead"
    )
  workdir = pathlib.Path(paths.of(workdir))
  stop = signals.StopRequest()
  with contextlib.ExitStack() as stack:
    with processes.together("opening the run") as seen:
      seen |= processes.program()
      validate.check(config)
      seen["config"] = config_lib.to_json(config)
      place = paths.of(checkpoints or workdir)
      for folder in {str(workdir), str(checkpoints or workdir)}:
        if not paths.is_remote(folder):
          disk.check_place(folder)
      tokenizer = workdir_lib.load_tokenizer(config.data.tokenizer, place)
      seen["tokenizer"] = tokenizer.fingerprint
      validate.check_vocabulary(config, tokenizer.vocab_size)
      mesh = sharding.make_mesh(config.mesh)
      validate.check_mesh(config, mesh)
      workdir_lib.check(workdir, config)
      steps = load.list_steps(place / workdir_lib.CHECKPOINTS)
      _check_lost(workdir, place, steps)
      begun = bool(steps) or workdir_lib.has_begun(workdir)
      here = (
        place == paths.of(workdir) and (workdir / workdir_lib.CONFIG).exists()
      )
      if not (here or steps):
        workdir_lib.check_tokenizer(place, tokenizer)
      # Open the data before creating the folder, so that mistakes leave
      # nothing.
      train = sources.open_split(config.data, "train", tokenizer=tokenizer)
      seen["training data"] = train.fingerprint
      feed = stack.enter_context(
        feed_lib.Feed(
          config, train, mesh, rows=config.training.batch_size, shuffle=True
        )
      )
      store = _validation_store(config, tokenizer, mesh)
      if not (begun or store) and processes.is_first():
        _check_validation(config, tokenizer)
      seen["validation data"] = store.fingerprint if store else "none"
      seen["checkpoints"] = str(steps)
    with processes.together("claiming the run's folder"):
      if processes.is_first():
        stack.enter_context(claims.claim(workdir, config, place))
    with processes.together("looking for the run's checkpoints") as seen:
      seen["folder of checkpoints"] = claims.claimed_by(place)
    code = _train(config, workdir, place, mesh, tokenizer, feed, store, stop)
    processes.leave()
    if (
      code == 0
      and config.evaluation.run_after_training
      and processes.is_first()
    ):
      code = _evaluate(config, workdir, place, stop)
  return code


def _train(
  config: config_lib.Config,
  workdir: pathlib.Path,
  place: epath.Path,
  mesh: jax.sharding.Mesh,
  tokenizer: tokenizer_lib.Tokenizer,
  feed: feed_lib.Feed,
  store: sources.Split | None,
  stop: signals.StopRequest,
) -> int:
  abstract = state_lib.abstract_state(config, mesh)
  meta = make_meta(config, tokenizer, abstract.params)
  validation = store.fingerprint if store else None

  def check(saved: dict[str, Any]) -> None:
    _check_meta(saved, meta, config, place)
    # What a run has of another model is not read again; see `inherit`.
    kept = ("ends", "chat_template", "init_from", "validation")
    meta.update({k: saved[k] for k in kept if k in saved})

  with (
    jax.set_mesh(mesh),
    stop,
    contextlib.closing(
      checkpoint.Checkpoints(place, keep=config.training.keep_checkpoints)
    ) as checkpoints,
  ):
    with processes.together("reading the checkpoint"):
      restored = checkpoints.restore(abstract, check)

    def keep_tokenizer():
      with processes.together("keeping the tokenizer"):
        if processes.is_first():
          workdir_lib.keep_tokenizer(place, tokenizer)

    if restored:
      keep_tokenizer()
    if restored and restored.step >= config.training.steps:
      print(f"{place}: all {restored.step} steps are done", flush=True)
      return 0
    with processes.together("opening the checkpoints"):
      checkpoints.check_writable()
    print(_describe(config, mesh, meta), flush=True)
    if restored:
      print(f"{place}: going on from step {restored.step}", flush=True)
      if validation and meta.get("validation", validation) != validation:
        print(
          "the validation text has changed since then; validation losses"
          " before and after are of different texts",
          flush=True,
        )
    elif config.training.init_from:
      restored = _begin_from(config, mesh, tokenizer, feed, meta)
    keep_tokenizer()  # of a new run, once it can begin
    if validation:
      meta["validation"] = validation
    # The innermost context: a process of several then ends before the others
    # wait for a save.
    with faults.end_at_once():
      code = loop.train(
        loop.Run(config, workdir, mesh, tokenizer, feed, store, meta),
        restored,
        checkpoints,
        stop,
      )
  if code == 0 and processes.is_first():
    with faults.end_at_once():  # the others wait for this process
      print(f"trained {config.training.steps} steps; saved in {place}")
      print(plot.loss_curve(workdir), flush=True)
  return code


def _begin_from(
  config: config_lib.Config,
  mesh: jax.sharding.Mesh,
  tokenizer: tokenizer_lib.Tokenizer,
  feed: feed_lib.Feed,
  meta: dict[str, Any],
) -> checkpoint.Restored:
  """Reads the initial parameters; adds to `meta` what comes with them."""
  # A late import, because training does not depend on evaluation and export.
  from memcomp.training import init_from

  with processes.together("reading training.init_from") as seen:
    begun = init_from.begin(config, mesh, tokenizer)
    seen["parameters to begin from"] = str(begun.record["sha256"])
  meta["init_from"] = begun.record
  inherit(meta, begun.meta)
  print(init_from.describe(begun.record), flush=True)
  return checkpoint.Restored(0, begun.state, feed.place(), meta)


def _validation_store(
  config: config_lib.Config,
  tokenizer: tokenizer_lib.Tokenizer,
  mesh: jax.sharding.Mesh,
) -> sources.Split | None:
  """Opens the data of the validation loss early, to find mistakes."""
  if not config.training.evaluate_every:
    return None
  store = sources.open_split(config.data, "validation", tokenizer=tokenizer)
  rows = config.training.batch_size // config.training.accumulation
  with feed_lib.Feed(config, store, mesh, rows=rows, shuffle=False):
    return store


def _check_validation(
  config: config_lib.Config, tokenizer: tokenizer_lib.Tokenizer
) -> None:
  """Opens what only the evaluation after training reads, to find mistakes.

  After training the run's config cannot be corrected any more.
  """
  if config.data.validation and config.evaluation.run_after_training:
    sources.open_split(config.data, "validation", tokenizer=tokenizer)


def _evaluate(
  config: config_lib.Config,
  workdir: pathlib.Path,
  place: epath.Path,
  stop: signals.StopRequest,
) -> int:
  try:
    # A late import, because training does not depend on evaluation.
    from memcomp.evaluation import run as evaluation_run

    if stop.requested:
      raise KeyboardInterrupt  # during the last step, which needed no stop
    evaluation_run.after_training(config, workdir, place)
  except (KeyboardInterrupt, errors.Terminated):
    print(
      "\nstopped: training is done and saved; the same command evaluates it",
      file=sys.stderr,
      flush=True,
    )
    return errors.EXIT_RESUMABLE
  return 0


def _check_lost(
  workdir: pathlib.Path, place: epath.Path, steps: list[int]
) -> None:
  """Checks that the checkpoints of a run that goes on are where they were.

  Without them the run would begin anew, and its log would be lost.
  """
  log = workdir / metrics.FILE
  logged = metrics.read(log) if log.exists() and not steps else []
  # `Checkpoints.restore` reports damaged checkpoints.
  if not logged or any((place / workdir_lib.DAMAGED).glob("*")):
    return
  saved = workdir_lib.saved_config(workdir).training
  # A save waits for the one before it, so after 2 * checkpoint_every learned
  # steps one has ended. Skipped steps are not saved.
  learned = max(record["step"] - record.get("skipped", 0) for record in logged)
  every = saved.checkpoint_every
  if learned >= saved.steps or (every and learned > 2 * every):
    raise errors.UserError(
      f"{workdir} has a log up to step {logged[-1]['step']}, but {place} has no"
      " checkpoint; give --checkpoints as before, or another --workdir"
    )


def make_meta(
  config: config_lib.Config, tokenizer: tokenizer_lib.Tokenizer, params: Any
) -> dict[str, Any]:
  """Returns the metadata of a checkpoint, for JSON.

  Args:
    config: config of the run.
    tokenizer: tokenizer of the training.
    params: the parameters or their shapes.
  """
  meta = {
    "config": config_lib.to_dict(config),
    "param_count": sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
    "tokenizer": tokenizer.fingerprint,
    "ends": list(tokenizer.ends),
    "versions": platforms.versions(),
  }
  if config.data.format == "messages":
    # Whole, so that a chat does not need the tokenizer's folder.
    template = chat_template.load(config.data.chat_template)
    meta["chat_template"] = template.spec
  return meta


def inherit(meta: dict[str, Any], source: dict[str, Any]) -> None:
  """Ends texts and writes conversations as another model does.

  Of a model with another tokenizer, whose ids differ, nothing is taken.

  Args:
    meta: metadata of a run that begins from the model; it is changed. Its own
      chat template stays.
    source: metadata of the model.
  """
  if meta["tokenizer"] != source["tokenizer"]:
    return
  meta["ends"] = source.get("ends", meta["ends"])
  if "chat_template" in source:
    meta.setdefault("chat_template", source["chat_template"])


def _check_meta(
  saved: dict[str, Any],
  mine: dict[str, Any],
  config: config_lib.Config,
  place: epath.Path,
) -> None:
  """Checks that a checkpoint belongs to this run."""
  workdir_lib.check_same(saved["config"], config, f"the checkpoint in {place}")
  if saved["tokenizer"] != mine["tokenizer"]:
    raise errors.UserError(
      f"the checkpoint in {place} was trained with another tokenizer: "
      f"{config.data.tokenizer} has changed since; restore the file, or choose "
      "another --workdir"
    )


def _describe(
  config: config_lib.Config, mesh: jax.sharding.Mesh, meta: dict[str, Any]
) -> str:
  training = config.training
  tokens = training.batch_size * config.data.sequence_length
  devices = mesh.devices.flat
  axes = " ".join(f"{k} {v}" for k, v in mesh.shape.items() if v > 1)
  state_bytes = overview.state_bytes(config.model, config.data.sequence_length)
  return (
    f"{config.name}: {overview.describe(config.model)}; "
    f"{meta['param_count']:,} parameters, "
    f"{state_bytes:,} bytes of state a sequence\n"
    f"{training.steps} steps of {tokens:,} tokens on {mesh.size} x "
    f"{devices[0].device_kind}{f' ({axes})' if axes else ''}"
  )
