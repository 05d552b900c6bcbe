"""Converts a trained model to a run of a model with another memory."""

import contextlib
import copy
import itertools
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from memcomp import config as config_lib
from memcomp import disk, errors, integrity, limits, paths, progress, sharding
from memcomp.convert import distill, swap
from memcomp.data import sources
from memcomp.evaluation import load
from memcomp.export import huggingface
from memcomp.models import abstract, decoder, overview
from memcomp.runs import workdir as workdir_lib
from memcomp.training import checkpoint, loop, validate, validation
from memcomp.training import feed as feed_lib
from memcomp.training import run as run_lib
from memcomp.training import state as state_lib

REPORT = "convert.json"
LOG_EVERY = 50
"""Steps between two reports of the errors."""


def convert(
  source: str | os.PathLike,
  workdir: str | os.PathLike,
  mixer: str,
  *,
  step: int | None = None,
  layers: Sequence[int] | None = None,
  distill_steps: int = 200,
  distill_learning_rate: float = 3e-3,
  overrides: dict[str, Any] | None = None,
  fsdp: int = 1,
) -> dict[str, Any]:
  """Replaces mixers, distills them, and writes a run for further training.

  The run has one checkpoint at step 0 with a fresh optimizer. Its data order
  continues after the batches of the distillation.

  Args:
    source: a checkpoint, see `load.open_checkpoint`.
    workdir: folder to create, completely or not at all.
    mixer: the new mixer, in the syntax of `swap.parse`.
    step: step of a run; None is the newest.
    layers: depths to convert; None is all.
    distill_steps: steps of layer-wise distillation, >= 0.
    distill_learning_rate: peak learning rate of the distillation, > 0.
    overrides: fields of the run's config that differ from the source's, as
      `training.steps` -> value.
    fsdp: number of devices that shard parameters and batch.

  Returns:
    The contents of `convert.json`: `copied` arrays, those of the old mixers
    that were `left`, relative squared `errors` of every new mixer by
    distillation step, and validation losses (`nats` per token, `bits` per byte)
    of `teacher`, `swapped` and `distilled`.

  Raises:
    UserError: no checkpoint; bad mixer, layers, config or data; `workdir`
      exists; a full disk.
  """
  paths.check_local("workdir", workdir)
  out = pathlib.Path(workdir).absolute()
  disk.require_free(out)
  limits.check("--distill_steps", distill_steps, 0)
  if not 0 < distill_learning_rate < math.inf:
    raise errors.UserError(
      f"--distill_learning_rate={distill_learning_rate}: give a finite number"
      " above 0"
    )
  mesh = sharding.make_mesh(config_lib.MeshConfig(fsdp=fsdp))
  opened = load.open_checkpoint(source, step, mesh)
  trained = opened.config
  if huggingface.is_checkpoint(source):
    trained = huggingface.config_of(source)  # its rows are those of a new run
  config = _config(trained, overrides or {}, fsdp)
  old = opened.config.model
  layers = sorted(set(range(old.num_layers) if layers is None else layers))
  # If `layers` are out of range, any mixer will do: `config_with` raises.
  like = dict(enumerate(old.layer_mixers())).get(min(layers, default=0))
  new = swap.parse(mixer, like or old.layer_mixers()[0])
  config.model = swap.config_with(old, new, layers)
  validate.check(config)
  validate.check_vocabulary(config, opened.tokenizer.vocab_size)
  validate.check_mesh(config, mesh)

  teacher = abstract.plain(nnx.split(opened.model)[1])
  with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
    train = sources.open_split(config.data, "train", tokenizer=opened.tokenizer)
    feed = stack.enter_context(
      feed_lib.Feed(
        config, train, mesh, rows=config.training.batch_size, shuffle=True
      )
    )
    score = _scorer(config, opened, mesh)
    start = state_lib.initial_state(config, mesh)
    swapped = swap.swap(
      old, teacher, new, layers=layers, fresh=start.params, mesh=mesh
    )
    print(
      f"{overview.mixer_names(old)} -> {overview.mixer_names(config.model)} in"
      f" layers {','.join(map(str, layers))} of {old.num_layers};"
      f" {len(swapped.copied)} arrays of the old mixers taken over",
      flush=True,
    )
    if swapped.left:
      print(f"without a place in the new ones: {_by_path(swapped.left)}")
    report: dict[str, Any] = {
      "source": config.name,
      "source_step": opened.step,
      "layers": layers,
      "copied": swapped.copied,
      "left": swapped.left,
      "distill_steps": distill_steps,
      "distill_learning_rate": distill_learning_rate,
      "errors": {},
      "validation": {
        "teacher": score("teacher", old, teacher),
        "swapped": score("swapped", config.model, swapped.params),
      },
    }
    params, place = swapped.params, feed.place()
    if distill_steps:
      settings = config_lib.OptimizerConfig(
        learning_rate=distill_learning_rate,
        final_learning_rate=distill_learning_rate / 100,
        warmup_steps=min(20, distill_steps // 10),
        weight_decay=0.0,
      )
      made = distill.make(old, config.model, layers, settings, distill_steps)
      params, place = _distill(
        made, params, teacher, feed, distill_steps, report["errors"]
      )
      report["validation"]["distilled"] = score(
        "distilled", config.model, params
      )
      last = report["validation"]["distilled"]
      if last and not math.isfinite(last["nats"]):
        raise errors.UserError(
          "distillation diverged: the validation loss is not finite; lower"
          " --distill_learning_rate"
        )
    # Initial memories are parameters, too.
    carry = state_lib.initial_carry(
      config,
      abstract.model_of(config.model),
      params,
      config.training.batch_size,
    )
    start = start._replace(params=params, carry=carry)
    _write(out, config, opened, start, place, report)
  print(f"written: {out}, a run at step 0 of {config.training.steps}")
  return report


def _config(
  source: config_lib.Config, overrides: dict[str, Any], fsdp: int
) -> config_lib.Config:
  """The source's config with `overrides`, but still its model.

  Raises:
    UserError: a text is given for a run that trains on the rows of a task.
  """
  for flag in ("source", "validation"):
    if f"data.{flag}" in overrides and source.data.task is not None:
      raise errors.UserError(
        f"--{flag}: the run trains on rows of task {source.data.task.name}, not"
        f" on text; leave --{flag} out"
      )
  config = copy.deepcopy(source)
  config.mesh = config_lib.MeshConfig(fsdp=fsdp)
  # The new run begins from the conversion, whatever the source began from.
  fresh = config_lib.TrainingConfig()
  for field in ("init_from", "init_partially", "keep_optimizer"):
    setattr(config.training, field, getattr(fresh, field))
  if "data.source" in overrides and "data.validation" not in overrides:
    # The validation text of before belongs to the source of before.
    data = config.data
    data.validation = ""
    share = config_lib.DataConfig().validation_share
    data.validation_share = data.validation_share or share
  for path, value in overrides.items():
    group, field = path.split(".")
    setattr(getattr(config, group), field, value)
  steps, opt = config.training.steps, config.optimizer
  if "training.steps" in overrides:
    opt.warmup_steps = min(opt.warmup_steps, steps // 10)
  if "optimizer.learning_rate" in overrides:
    opt.final_learning_rate = min(opt.final_learning_rate, opt.learning_rate)
  if config.training.profile_start >= steps:
    config.training.profile_start = -1
  return config


def _by_path(left: list[str]) -> str:
  """Returns the names of arrays within mixers, without the layers' numbers."""
  return ", ".join(dict.fromkeys(n.split(".mixer.", 1)[1] for n in left))


def _scorer(config, opened: load.Checkpoint, mesh):
  """Returns (name, model, params) -> validation loss, which it also prints."""
  data, tokenizer = config.data, opened.tokenizer
  store: sources.Split | None = None
  try:
    store = sources.open_split(data, "validation", tokenizer=tokenizer)
  except errors.UserError as error:
    print(f"no validation loss: {error}")

  def score(name: str, model: decoder.DecoderConfig, params: Any):
    if store is None:
      return None
    of = copy.deepcopy(config)
    of.model = model
    sizes = loop.token_bytes(tokenizer, store)
    found = validation.make(of, store, mesh, sizes)(params)
    if found["validation_loss"] is None:
      print(f"{name:>10}: nothing was scored of {store.name}", flush=True)
      return None
    print(
      f"{name:>10}: validation loss {found['validation_loss']:.4f},"
      f" {found['validation_bits_per_byte']:.4f} bits per byte",
      flush=True,
    )
    return {
      "nats": found["validation_loss"],
      "bits": found["validation_bits_per_byte"],
    }

  return score


def _distill(made, params, teacher, feed, steps: int, log: dict):
  """Trains the new mixers; returns all parameters and the feed's position."""
  trained, opt_state = made.start(params)
  shown = progress.Progress("distilling, steps", steps)
  place = feed.place()

  def record(number: int, found: jax.Array) -> None:
    log[number] = [round(float(x), 6) for x in found]
    print(
      f"step {number}: relative squared error by layer"
      f" {' '.join(f'{x:.4f}' for x in log[number])}",
      flush=True,
    )
    if not all(x < float("inf") for x in log[number]):
      raise errors.UserError(
        f"distillation diverged at step {number}; lower --distill_learning_rate"
      )

  for number, (batch, after) in enumerate(itertools.islice(feed, steps)):
    place = after
    trained, opt_state, found = made.step(
      trained, opt_state, params, teacher, batch
    )
    if number % LOG_EVERY == 0:
      record(number, found)
    shown.advance()
  # Errors are of before a step: one more, not kept, tells what the last did.
  result = jax.tree.map(jnp.copy, trained)
  *_, found = made.step(trained, opt_state, params, teacher, batch)
  record(steps, found)
  return distill.replaced(params, result), place


def _write(out, config, opened, state, place, report) -> None:
  """Writes the run's folder; the config is last, because it marks a run."""
  meta = run_lib.make_meta(config, opened.tokenizer, state.params)
  run_lib.inherit(meta, opened.meta)
  with disk.new_folder(out) as folder:
    with contextlib.closing(
      checkpoint.Checkpoints(folder, keep=config.training.keep_checkpoints)
    ) as checkpoints:
      checkpoints.save(0, state, place, meta)
    workdir_lib.keep_tokenizer(folder, opened.tokenizer)
    integrity.replace_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
    integrity.replace_text(
      folder / workdir_lib.CONFIG, config_lib.to_json(config)
    )
