"""Checks of a config before anything is built from it."""

import os
import sys

import jax

from memcomp import config as config_lib
from memcomp import errors, limits, sharding
from memcomp.data import sources
from memcomp.layers import softmax_attention
from memcomp.models import abstract
from memcomp.training import optimizer, passing


def check(config: config_lib.Config) -> None:
  """Checks types, ranges and dependent fields.

  Raises:
    UserError: naming the field, its value and the allowed values.
  """
  config_lib.check_types(config)
  place = os.path.normpath(config.name)
  if not config.name.strip() or place.startswith((".", "/")):
    raise errors.UserError(
      f"name = {config.name!r} is no folder below runs/; give the run a name"
    )
  try:
    config.model.validate()
  except ValueError as error:
    raise errors.UserError(f"model: {error}") from error
  sources.check(config.data)
  for name in ("optimizer", "training", "mesh"):
    config_lib.check_ranges(getattr(config, name), f"{name}.")
  limits.check("model.num_layers", config.model.num_layers, 1, 1 << 16)
  for path in config_lib.SEEDS:
    _require(config, path, limits.is_seed, f"must be {limits.A_SEED}")
  steps = config.training.steps
  _require(
    config,
    "training.profile_start",
    lambda v: v < steps,
    f"counts from 0 and must be below training.steps = {steps}; -1 is off",
  )
  _check_optimizer(config)
  _check_batch(config)
  _check_start(config.training)
  _check_evaluation(config.evaluation)
  task = config.data.task
  if task is not None and task.ids() > config.model.vocab_size:
    raise errors.UserError(
      f"task {task.name} has {task.ids()} ids, more than model.vocab_size ="
      f" {config.model.vocab_size}; set model.vocab_size to {task.ids()} or"
      " more"
    )


def check_mesh(config: config_lib.Config, mesh: jax.sharding.Mesh) -> None:
  """Checks that the mesh divides rows, time, parameters and heads.

  Every process must own a part of the mesh. Warns on stderr if a better mesh is
  known.

  Raises:
    UserError: naming the sizes, and a mesh that would fit.
  """
  idle = set(range(jax.process_count()))
  idle -= {device.process_index for device in mesh.devices.flat}
  if idle:
    raise errors.UserError(
      f"the mesh takes {mesh.size} of the {jax.device_count()} devices, and"
      f" none of process {', '.join(map(str, sorted(idle)))}; set"
      " mesh.replica=-1 to take all, or start fewer processes"
    )
  shards = mesh.shape["replica"] * mesh.shape["fsdp"]
  rows = config.training.batch_size // config.training.accumulation
  if rows % shards:
    raise errors.UserError(
      f"training.batch_size / training.accumulation = {rows} rows do not "
      f"divide over mesh.replica * mesh.fsdp = {shards} shards; set "
      f"training.batch_size to a multiple of "
      f"{shards * config.training.accumulation}, or mesh.replica * mesh.fsdp "
      f"to a divisor of {rows}"
    )
  for tokens in _lengths(config):
    shards = mesh.shape["context"]
    if tokens % shards:
      raise errors.UserError(
        f"rows of {tokens} tokens (data.sequence_length, or a task's) do not"
        f" divide over mesh.context = {shards} shards; set mesh.context to a"
        f" divisor of {tokens}"
      )
  model = abstract.model_of(config.model)
  sharding.check_divides(abstract.merge(model.graphdef, model.variables), mesh)
  warning = sharding.narrow_shards(config.model.d_model, mesh)
  if warning and mesh.devices.flat[0].platform == "tpu":
    print(f"warning: {warning}", file=sys.stderr, flush=True)


def _lengths(config: config_lib.Config) -> list[int]:
  """Row lengths in tokens of training and validation."""
  length, task = config.data.sequence_length, config.data.task
  if task is None:
    return [length]
  return [n for split in sources.SPLITS for n in task.lengths(split, length)]


def check_vocabulary(config: config_lib.Config, vocab_size: int) -> None:
  """Checks that the model's vocabulary includes the tokenizer's.

  Raises:
    UserError: naming both sizes.
  """
  if vocab_size > config.model.vocab_size:
    raise errors.UserError(
      f"tokenizer {config.data.tokenizer!r} has {vocab_size} ids, more than "
      f"model.vocab_size = {config.model.vocab_size}; set model.vocab_size to "
      f"{vocab_size} or more"
    )


def _check_optimizer(config: config_lib.Config) -> None:
  opt, steps = config.optimizer, config.training.steps
  if opt.name not in optimizer.NAMES:
    raise errors.UserError(
      f"optimizer.name = {opt.name!r} is unknown; choose one of "
      f"{', '.join(optimizer.NAMES)}"
    )
  if opt.name == "muon" and opt.base_width:
    raise errors.UserError(
      f"optimizer.base_width = {opt.base_width} scales AdamW's rates of"
      " matrices, which optimizer.name = 'muon' updates; set base_width to 0,"
      " or optimizer.name to adamw"
    )
  if opt.schedule not in optimizer.SCHEDULES:
    raise errors.UserError(
      f"optimizer.schedule = {opt.schedule!r} is unknown; choose one of "
      f"{', '.join(optimizer.SCHEDULES)}"
    )
  if opt.final_learning_rate > opt.learning_rate:
    raise errors.UserError(
      f"optimizer.final_learning_rate = {opt.final_learning_rate} is above "
      f"optimizer.learning_rate = {opt.learning_rate}; lower it"
    )
  if opt.warmup_steps >= steps:
    raise errors.UserError(
      f"optimizer.warmup_steps = {opt.warmup_steps} leaves none of "
      f"training.steps = {steps}; set --config.optimizer.warmup_steps below "
      f"{steps}"
    )


def _check_batch(config: config_lib.Config) -> None:
  training = config.training
  if training.batch_size % training.accumulation:
    raise errors.UserError(
      f"training.batch_size = {training.batch_size} does not split into "
      f"training.accumulation = {training.accumulation} equal parts; make it "
      "a multiple"
    )
  tokens = training.batch_size * config.data.sequence_length
  if tokens > limits.COUNT:
    raise errors.UserError(
      f"training.batch_size = {training.batch_size} rows of"
      f" data.sequence_length = {config.data.sequence_length} are {tokens}"
      f" tokens a step; give {limits.COUNT} or less"
    )
  if training.carry_state and config.data.packing != "stream":
    raise errors.UserError(
      "training.carry_state needs rows that continue one another, but "
      f"data.packing = {config.data.packing!r}; set data.packing to stream"
    )
  if passing.keeps_state(config):
    _check_room(config)


def _check_room(config: config_lib.Config) -> None:
  """Checks that a state that rows pass on has room for a row."""
  rows = config.data.sequence_length
  for name in set(config.model.layer_names()):
    mixer = config.model.mixers[name]
    if not isinstance(mixer, softmax_attention.SoftmaxAttentionConfig):
      continue
    if mixer.max_length < rows and not mixer.window_size:
      raise errors.UserError(
        f"model.mixers.{name}.max_length = {mixer.max_length} is less than"
        f" data.sequence_length = {rows}: with carry_state or state_passing,"
        " attention would forget tokens of the same row; set max_length to"
        f" {rows} or more"
      )


def _check_start(training: config_lib.TrainingConfig) -> None:
  for name in ("init_partially", "keep_optimizer"):
    if getattr(training, name) and not training.init_from:
      raise errors.UserError(
        f"training.{name} means nothing without training.init_from; set that,"
        " or leave it out"
      )
  if training.init_partially and training.keep_optimizer:
    raise errors.UserError(
      "training.keep_optimizer needs moments of all parameters, which"
      " training.init_partially does not have; leave one of them out"
    )


def _check_evaluation(settings: config_lib.EvaluationConfig) -> None:
  """Checks early what is used only after the last step."""
  # A late import, because training does not depend on evaluation.
  from memcomp.evaluation import tasks

  try:
    tasks.check(settings)
  except errors.UserError as error:
    raise errors.UserError(f"evaluation.{error}") from error


def _require(config, path, accepts, rule) -> None:
  value = config
  for name in path.split("."):
    value = getattr(value, name)
  if not accepts(value):
    raise errors.UserError(f"{path} = {value!r}; it {rule}")
