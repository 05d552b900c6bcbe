"""The experiment configuration: one typed tree, saved with every checkpoint.

Each layer's own configuration sits beside the layer; this file holds what an
experiment adds. Configs are returned by `get_config` in `configs/*.py` and
overridden on the command line (`--config.training.steps=10`); an unknown field
or a value of the wrong type is an error.
"""

import contextlib
import dataclasses
import json
from typing import Any

from memcomp.data.synthetic import task as task_lib
from memcomp.layers import options, registry
from memcomp.models import decoder


@dataclasses.dataclass(kw_only=True, slots=True)
class DataConfig:
  """Where tokens come from and how they are laid into rows.

  Attributes:
    source: "stdlib" (the running interpreter's library sources; needs no
      download), or comma-separated paths: text files, folders, globs (.txt .md
      .py .jsonl, each also .gz or .zst; a file counts once), a folder written
      by `memcomp.data.prepare`, or a flat token file (.bin). A weighted mixture
      is written `0.7:pathA;0.3:pathB`.
    validation: source of the validation tokens; "" takes a share of `source`,
      chosen by a hash of each file's name.
    validation_share: that share, in [0, 1).
    task: a synthetic task (`memcomp.data.synthetic`) to train on in place of
      text: then no source is read, `tokenizer` is the task's ("none", but
      "bytes" for needles), and `sequence_length` is that of its longest row or
      more.
    tokenizer: "bytes" (256 ids, no dependency), a path to a tokenizer.json, or
      "none" (ids that mean no text).
    packing: "joined" (all text in one stream, cut into rows, no boundaries),
      "concat" (the same, documents kept apart by segment_ids), "first_fit"
      (whole documents, first-fit, padded) or "stream" (each row of the batch
      continues where it stopped one step earlier; for training with the state
      carried across steps).
    stretch: windows that a row of packing "stream" reads on before it goes on
      at another place of the text, drawn without replacement; 0 reads whole
      parts of the text. Short stretches keep the batch a mixture of places.
      Validation reads on without jumps.
    sequence_length: tokens a row, >= 1.
    seed: of the order of rows.
    prefetch: batches read ahead by a background thread; 0 reads in line.
  """

  source: str = "stdlib"
  validation: str = ""
  validation_share: float = 0.05
  task: task_lib.TaskConfig | None = None
  tokenizer: str = "bytes"
  packing: str = "joined"
  stretch: int = 0
  sequence_length: int = 256
  seed: int = 0
  prefetch: int = 2


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig:
  """AdamW with a warm-up and a schedule.

  Attributes:
    learning_rate: peak value.
    final_learning_rate: value at the last step.
    schedule: after the warm-up "cosine", "linear" or "constant_then_decay"
      (constant, then linear to the final value over the last `decay_share`).
    warmup_steps: linear from zero to the peak; may be 0.
    decay_share: share of the steps, in (0, 1], for "constant_then_decay".
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: on matrices only (not on norms, biases, convolutions, gates'
      biases or initial memories), multiplied by the learning rate.
    corrected_decay: multiply the weight decay by the learning rate over its
      peak once more (AdamC), so that the ratio of update and decay is kept.
    base_width: width w that rates were tuned at: matrices of a model of width
      d (other than the embedding) take the learning rate times w / d and the
      weight decay times d / w (muP); 0 is off.
    clip_norm: gradients are scaled down to this global norm; 0 turns it off.
  """

  learning_rate: float = 3e-3
  final_learning_rate: float = 1e-5
  schedule: str = "cosine"
  warmup_steps: int = 100
  decay_share: float = 0.2
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  corrected_decay: bool = False
  base_width: int = 0
  clip_norm: float = 1.0


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainingConfig:
  """The training loop.

  Attributes:
    steps: optimizer steps.
    batch_size: rows per optimizer step, over all processes.
    accumulation: micro-batches that one optimizer step is split into.
    z_loss: weight of the squared log-normaliser of the logits; 0 is off.
    loss_chunk: tokens of a row whose logits exist at once; 0 is all.
    implementation: of memories, where it can do the call, such as
      "xla_chunked", "mosaic_tpu" or "mosaic_gpu": speed alone. Empty for the
      platform's fastest.
    carry_state: hand each row's state to the next step where the text goes on
      (truncated backpropagation through windows); needs packing "stream".
    state_passing: share of the rows of a step, in [0, 1], that begin from the
      final state of the row that stood in their place one step before, of
      whatever text, without a gradient into it. The memory then learns to go
      on from states that are older than a row. The rows are drawn from `seed`
      and the step alone; the others begin as without. Memories that grow keep
      the newest of their `max_length` tokens.
    init_from: run, export or Hugging Face checkpoint whose parameters a new
      run begins with; "" draws them. A run that has a checkpoint of its own
      goes on from that.
    init_partially: take only the arrays of `init_from` that fit by name and
      shape; otherwise one that does not is an error.
    keep_optimizer: also take Adam's moments from `init_from`, which is then a
      run. The schedule begins anew.
    max_nonfinite_steps: stop after this many steps in a row whose loss or
      gradient was not finite (each is skipped and counted).
    log_every: steps between two lines of metrics.
    evaluate_every: steps between two validation losses; 0 is never.
    evaluate_batches: batches of `batch_size` rows of a validation loss, the
      same ones each time. Runs with other batch sizes read more or less of the
      text, unless these are all of it.
    checkpoint_every: steps between two checkpoints.
    keep_checkpoints: newest checkpoints that stay on disk, >= 1.
    watchdog_seconds: end the process, with the stacks of its threads, if it
      gets no further (step, validation, save) for so long; 0 is never. It
      counts from the first step on, so a compilation may take its time.
    profile_start: first step of the profiler trace; negative is off.
    profile_steps: steps in the trace.
    tensorboard: also write TensorBoard files (extra `tb`).
  """

  steps: int = 1000
  batch_size: int = 8
  accumulation: int = 1
  z_loss: float = 0.0
  loss_chunk: int = 0
  implementation: str = ""
  carry_state: bool = False
  state_passing: float = 0.0
  init_from: str = ""
  init_partially: bool = False
  keep_optimizer: bool = False
  max_nonfinite_steps: int = 10
  log_every: int = 20
  evaluate_every: int = 0
  evaluate_batches: int = 8
  checkpoint_every: int = 500
  keep_checkpoints: int = 2
  watchdog_seconds: float = 1800.0
  profile_start: int = -1
  profile_steps: int = 3
  tensorboard: bool = False


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig:
  """Sizes of the mesh axes; their product is the number of devices used.

  Attributes:
    replica: copies of the parameters, each with its share of the batch; -1
      takes the devices the other axes leave.
    fsdp: shards of parameters and batch.
    tensor: shards of heads, mlp and vocab.
    context: shards of time.
  """

  replica: int = 1
  fsdp: int = 1
  tensor: int = 1
  context: int = 1


@dataclasses.dataclass(kw_only=True, slots=True)
class EvaluationConfig:
  """What `train.py` does after the last step, and `eval.py`'s defaults.

  Attributes:
    run_after_training: evaluate, sample and print the tables at the end.
    lengths: multiples of the trained length that perplexity is streamed to.
    rows: rows streamed side by side.
    byte_models: also fit order-k byte models and run gzip, for comparison.
    prompt: text that the sample at the end continues.
    sample_tokens: its length in tokens.
    temperature: of the sample; 0 is greedy.
    top_k: sample among this many likeliest tokens; 0 is all.
    top_p: sample among the likeliest tokens of this mass, in (0, 1].
    min_p: sample among tokens at least this times as likely as the likeliest,
      in [0, 1]; 0 is all.
    repetition_penalty: of tokens that stand in the text; 1 is none.
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

  A mixer's configuration says which under "name", and so does a task's. A
  model's mixers have the sizes that follow from its width.
  """
  values: dict[str, Any] = {}
  if isinstance(config, decoder.DecoderConfig):
    # Sizes that do not fit are refused elsewhere.
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
