"""The experiment config: one typed tree, saved with every checkpoint.

The config of each layer is next to the layer. This file adds the rest of an
experiment. `get_config` in `configs/*.py` returns configs, and flags override
fields (`--config.training.steps=10`). An unknown field or a value of the wrong
type is an error. Ranges of the optimizer, the training loop and the mesh stand
at their fields, others in `training.validate`.
"""

import contextlib
import dataclasses
import json
import math
import types
import typing
from typing import Any

from memcomp import errors, limits
from memcomp.data.synthetic import task as task_lib
from memcomp.layers import options, registry
from memcomp.models import decoder
from memcomp_kernels import dispatch
from memcomp_kernels.options import (
  at_least,
  at_most,
  not_negative,
  option,
  positive,
)

SEEDS = ("seed", "data.seed")
"""Fields of a `Config` that accept any seed."""


def _below_one(x: float) -> str | None:
  return None if 0 <= x < 1 else "must lie in [0, 1)"


def _share(x: float) -> str | None:
  return None if 0 <= x <= 1 else "must lie in [0, 1]"


def _copies(x: int) -> str | None:
  return None if x >= 1 or x == -1 else "must be >= 1, or -1"


def _waiting_time(x: float) -> str | None:
  if 0 <= x <= limits.SECONDS:
    return None
  return f"must lie in [0, {limits.SECONDS}]; 0 is never"


def _implementation(x: str) -> str | None:
  if x in ("", *dispatch.NAMES):
    return None
  return f"must be empty or one of {', '.join(dispatch.NAMES)}"


@dataclasses.dataclass(kw_only=True, slots=True)
class DataConfig:
  """Where tokens come from and how they are packed into rows.

  Attributes:
    source: "stdlib" (the running interpreter's library sources; no download),
      or comma-separated paths: text files, folders, globs (.txt .md .py .jsonl,
      each also .gz or .zst; each file counts once), a folder written by
      `memcomp.data.prepare`, or a flat token file (.bin). A weighted mixture is
      written `0.7:pathA;0.3:pathB`; packing "stream" rounds the weights to
      whole rows of a batch.
    validation: source of the validation tokens; "" takes a share of `source`,
      chosen by a hash of each file's name.
    validation_share: size of that share, in [0, 1).
    format: "text", or "messages": .jsonl with a conversation per line,
      `{"messages": [{"role": "user", "content": "..."}, ...]}` with the roles
      system, user and assistant. The loss then counts only the assistant's
      tokens and the end of its turn. It needs another packing than "joined".
    chat_template: how "messages" become text: "chatml" (no dependency), or the
      `chat_template` of a tokenizer_config.json, given by its path or folder;
      a chat_template.jinja beside it comes first.
    task: a synthetic task (`memcomp.data.synthetic`) to train on instead of
      text. It needs no source. `tokenizer` must be the task's ("none", or
      "bytes" for needles), and `sequence_length` at least that of its longest
      row.
    tokenizer: "bytes" (256 ids, no dependency), a path to a tokenizer.json, or
      "none" (ids without text).
    packing: "joined" (all text in one stream, cut into rows, no boundaries),
      "concat" (the same, with documents separated by segment_ids), "first_fit"
      (whole documents, first-fit, padded) or "stream" (each row continues where
      it stopped one step earlier, for training with state carried across
      steps).
    stretch: number of windows that a row of packing "stream" reads before it
      continues at another place of the text, drawn without replacement; 0 reads
      whole parts of the text. Short stretches keep the batch a mixture of
      places. Validation never jumps.
    sequence_length: tokens per row, >= 1.
    seed: seed of the row order.
    prefetch: batches that a background thread reads ahead; 0 disables it.
  """

  source: str = "stdlib"
  validation: str = ""
  validation_share: float = 0.05
  format: str = "text"
  chat_template: str = "chatml"
  task: task_lib.TaskConfig | None = None
  tokenizer: str = "bytes"
  packing: str = "joined"
  stretch: int = 0
  sequence_length: int = 256
  seed: int = 0
  prefetch: int = 2


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig:
  """AdamW or Muon, with warmup and a schedule.

  Attributes:
    name: "adamw", or "muon", which orthogonalizes the momentum of each layer's
      matrices (arXiv 2502.16982) and leaves all other parameters to AdamW. Its
      updates are as large as AdamW's, so rates and weight decay carry over.
    momentum: decay of Muon's momentum; AdamW has `b1`, `b2` and `eps`.
    learning_rate: peak value.
    final_learning_rate: value at the last step.
    schedule: schedule after the warmup: "cosine", "linear" or
      "constant_then_decay" (constant, then linear to the final value over the
      last `decay_share` of the steps).
    warmup_steps: steps of linear increase from zero to the peak; may be 0.
    decay_share: share of the steps, in (0, 1], for "constant_then_decay".
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: multiplied by the learning rate; for matrices only (not norms,
      biases, convolutions, gate biases or initial memories).
    corrected_decay: also multiply the weight decay by the learning rate over
      its peak (AdamC), which keeps the ratio of update and decay constant.
    base_width: width w at which rates were tuned. In a model of width d,
      matrices except the embedding use the learning rate times w / d and the
      weight decay times d / w (muP); 0 is off.
    clip_norm: maximum global norm of the gradients; 0 is off.
  """

  name: str = "adamw"
  momentum: float = option(0.95, _below_one)
  learning_rate: float = option(3e-3, positive)
  final_learning_rate: float = option(1e-5, not_negative)
  schedule: str = "cosine"
  warmup_steps: int = option(100, not_negative)
  decay_share: float = option(0.2, positive, at_most(1))
  b1: float = option(0.9, _below_one)
  b2: float = option(0.95, _below_one)
  eps: float = option(1e-8, positive)
  weight_decay: float = option(0.1, not_negative)
  corrected_decay: bool = False
  base_width: int = option(0, not_negative)
  clip_norm: float = option(1.0, not_negative)


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainingConfig:
  """The training loop.

  Attributes:
    steps: number of optimizer steps.
    batch_size: rows per optimizer step, over all processes.
    accumulation: micro-batches per optimizer step.
    z_loss: weight of the squared log-normalizer of the logits; 0 is off.
    loss_chunk: tokens of a row whose logits exist at the same time; 0 is all.
    implementation: implementation of memories that support the call, such as
      "xla_chunked", "mosaic_tpu" or "mosaic_gpu"; affects speed only. Empty for
      the platform's fastest.
    carry_state: pass each row's state to the next step if its text continues
      (truncated backpropagation through windows); needs packing "stream".
    state_passing: share of a step's rows, in [0, 1], that start from a previous
      state: the final state of the row at the same index one step before. There
      is no gradient into it, and its text may be unrelated. The memory then
      learns to continue from states older than a row. The draw depends only on
      `seed` and the step; other rows start as usual. Full attention keeps the
      newest of its `max_length` tokens, which must hold a row.
    init_from: run, export or Hugging Face checkpoint that provides a new run's
      initial parameters; "" draws them. A run with a checkpoint resumes from
      that instead.
    init_partially: whether to use only the arrays of `init_from` that match in
      name and shape; otherwise a mismatch is an error.
    keep_optimizer: whether to also use the moments of `init_from`, which
      must be a run. The schedule starts anew.
    max_nonfinite_steps: stop after this many consecutive steps with a
      non-finite loss or gradient; each such step is skipped and counted.
    log_every: steps between two lines of metrics.
    evaluate_every: steps between two validation losses; 0 is never.
    evaluate_batches: batches of `batch_size` rows per validation loss, always
      the same ones. So other batch sizes evaluate other amounts of text, unless
      these are all of it.
    checkpoint_every: steps between two checkpoints.
    keep_checkpoints: number of newest checkpoints to keep on disk, >= 1.
    watchdog_seconds: end the process and print its threads' stacks if there is
      no progress (step, validation, save) for this time; 0 is never. What
      compiles is not limited: the first step, the first validation, and the
      first step of another row length.
    profile_start: first step of the profiler trace, from 0; negative is off. A
      run that resumes beyond it traces the first steps that it takes.
    profile_steps: number of steps in the trace.
    tensorboard: whether to also write TensorBoard files (extra `tb`).
  """

  steps: int = option(1000, at_least(1))
  batch_size: int = option(8, at_least(1))
  accumulation: int = option(1, at_least(1))
  z_loss: float = option(0.0, not_negative)
  loss_chunk: int = option(0, not_negative)
  implementation: str = option("", _implementation)
  carry_state: bool = False
  state_passing: float = option(0.0, _share)
  init_from: str = ""
  init_partially: bool = False
  keep_optimizer: bool = False
  max_nonfinite_steps: int = option(10, at_least(1))
  log_every: int = option(20, at_least(1))
  evaluate_every: int = option(0, not_negative)
  evaluate_batches: int = option(8, at_least(1))
  checkpoint_every: int = option(500, at_least(1))
  keep_checkpoints: int = option(2, at_least(1))
  watchdog_seconds: float = option(1800.0, _waiting_time)
  profile_start: int = -1
  profile_steps: int = option(3, at_least(1))
  tensorboard: bool = False


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig:
  """Sizes of the mesh axes; their product is the number of devices used.

  Attributes:
    replica: copies of the parameters, each with a share of the batch; -1 uses
      all remaining devices.
    fsdp: shards of parameters and batch.
    tensor: shards of heads, mlp and vocab.
    context: shards of time.
  """

  replica: int = option(1, _copies)
  fsdp: int = option(1, at_least(1))
  tensor: int = option(1, at_least(1))
  context: int = option(1, at_least(1))


@dataclasses.dataclass(kw_only=True, slots=True)
class EvaluationConfig:
  """The evaluation after training, and the defaults of `eval.py`.

  Attributes:
    run_after_training: whether to evaluate, sample and print tables at the end.
    lengths: multiples of the trained length for streamed perplexity.
    rows: number of rows to stream in parallel.
    byte_models: whether to also fit order-k byte models and run gzip.
    prompt: text that the final sample continues.
    sample_tokens: length of the sample in tokens; 0 for no sample after
      training.
    temperature: temperature of the sample; 0 is greedy.
    top_k: sample from this many most likely tokens; 0 is all.
    top_p: sample from the most likely tokens of this mass, in (0, 1].
    min_p: sample from tokens whose probability is at least this times that of
      the most likely one, in [0, 1]; 0 is all.
    repetition_penalty: penalty of tokens already in the text; 1 is none.
  """

  run_after_training: bool = True
  lengths: int = 16
  rows: int = 16
  byte_models: bool = False
  prompt: str = "def "
  sample_tokens: int = 400
  temperature: float = 0.8
  top_k: int = 0
  top_p: float = 0.95
  min_p: float = 0.0
  repetition_penalty: float = 1.0


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
  """An experiment."""

  name: str
  seed: int = 0
  model: decoder.DecoderConfig = dataclasses.field(
    default_factory=decoder.DecoderConfig
  )
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(
    default_factory=OptimizerConfig
  )
  training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  evaluation: EvaluationConfig = dataclasses.field(
    default_factory=EvaluationConfig
  )


def to_dict(config: Any) -> dict[str, Any]:
  """Returns `config` as nested plain values, as saved with a checkpoint.

  The configs of mixers and tasks have their kind under "name". A model's mixers
  have all sizes filled in.
  """
  values: dict[str, Any] = {}
  if isinstance(config, decoder.DecoderConfig):
    # Other checks report sizes that do not fit.
    with contextlib.suppress(ValueError):
      config = config.at_width()
  if isinstance(config, options.MixerConfig):
    values["name"] = registry.name_of(config)
  if isinstance(config, task_lib.TaskConfig):
    values["name"] = config.name
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if isinstance(value, dict):  # of configs
      value = {name: to_dict(entry) for name, entry in value.items()}
    is_config = dataclasses.is_dataclass(value)
    values[field.name] = to_dict(value) if is_config else value
  return values


def to_json(config: Any) -> str:
  """Returns the resolved form of `config`: sorted, indented JSON."""
  return json.dumps(to_dict(config), indent=2, sort_keys=True) + "\n"


def check_types(config: Any, prefix: str = "") -> None:
  """Checks that every field has a value of its declared type.

  A dataclass does not check assignments in a config file.

  Raises:
    UserError: naming the field, its value and its type.
  """
  hints = typing.get_type_hints(type(config))
  for field in dataclasses.fields(config):
    value, path = getattr(config, field.name), prefix + field.name
    if dataclasses.is_dataclass(value):
      check_types(value, path + ".")
    elif isinstance(value, dict):  # of configs
      for name, entry in value.items():
        check_types(entry, f"{path}.{name}.")
    elif not _is_a(value, hints[field.name]):
      raise errors.UserError(
        f"{path} = {value!r} is {type(value).__name__}; it takes "
        f"{type_name(hints[field.name])}"
      )
    elif isinstance(value, float) and not math.isfinite(value):
      raise errors.UserError(f"{path} = {value!r}; give a finite number")
    elif path not in SEEDS and isinstance(value, int):
      limits.check(path, value, -limits.COUNT)


def check_ranges(config: Any, prefix: str = "") -> None:
  """Checks each field of one dataclass by the range that stands at it.

  Raises:
    UserError: naming the field, its value and its range.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    for check in field.metadata.get("checks", ()):
      if reason := check(value):
        raise errors.UserError(f"{prefix}{field.name} = {value!r}; it {reason}")


def type_name(hint: Any) -> str:
  """Returns a field's type in words for users."""
  words = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
  }
  return words.get(hint, getattr(hint, "__name__", str(hint)))


def _is_a(value: Any, hint: Any) -> bool:
  origin = typing.get_origin(hint)
  if origin in (typing.Union, types.UnionType):
    return any(_is_a(value, h) for h in typing.get_args(hint))
  if origin is not None:
    return isinstance(value, origin)
  if hint is Any or not isinstance(hint, type):
    return True
  if hint is float:
    return isinstance(value, int | float) and not isinstance(value, bool)
  if hint is int:
    return isinstance(value, int) and not isinstance(value, bool)
  return isinstance(value, hint)
