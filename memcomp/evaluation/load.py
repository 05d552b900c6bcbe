"""Opens a checkpoint for evaluation."""

import copy
import math
import os
from typing import Any, NamedTuple

from etils import epath
from flax import nnx
from jax.sharding import Mesh

from memcomp import config as config_lib
from memcomp import errors, paths
from memcomp.data import chat_template
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.export import huggingface, read
from memcomp.layers import registry
from memcomp.models import abstract, decoder, overview
from memcomp.runs import load as load_lib
from memcomp.runs import workdir as workdir_lib


class Checkpoint(NamedTuple):
  """A trained model with its run.

  Attributes:
    workdir: folder of its run, or of an exported model.
    step: number of training batches.
    config: config of its run.
    model: the model, on one device by default.
    tokenizer: the tokenizer of its training.
    meta: saved metadata, see `training.run`.
  """

  workdir: epath.Path
  step: int
  config: config_lib.Config
  model: decoder.Decoder
  tokenizer: tokenizer_lib.Tokenizer
  meta: dict[str, Any]

  def template(self) -> chat_template.Template | None:
    """Returns the chat template of its training; None if it read text.

    That of a Hugging Face checkpoint is its tokenizer's.

    Raises:
      UserError: it is broken, or a library is missing.
    """
    spec = self.meta.get("chat_template")
    return chat_template.of_spec(spec) if spec else None


def open_checkpoint(
  path: str | os.PathLike,
  step: int | None = None,
  mesh: Mesh | None = None,
) -> Checkpoint:
  """Reads a checkpoint.

  Args:
    path: a run's workdir, its `checkpoints` folder or one step's folder, also
      in a bucket; an exported model (`memcomp.export`), or one in the Hugging
      Face layout.
    step: the step to read; None is the newest complete one.
    mesh: mesh for the parameters; None is one device.

  Raises:
    UserError: there is none, it is damaged, or its tokenizer is gone or has
      changed.
  """
  for known, loader in (
    (read.is_export, read.load),
    (huggingface.is_checkpoint, huggingface.load),
  ):
    if known(path):
      return _of_export(path, step, loader(path, mesh))
  root, _ = load_lib.locate(path)
  step, meta, params = load_lib.read(path, step, mesh)
  config = workdir_lib.config_of(meta["config"], str(path))
  with errors.malformed(f"the meta of {path}", "restore it from a copy"):
    trained_with, _ = str(meta["tokenizer"]), int(meta["param_count"])
  model = load_lib.module_of(config, params)
  workdir = root.parent if root.name == workdir_lib.CHECKPOINTS else root
  tokenizer = workdir_lib.load_tokenizer(
    config.data.tokenizer, workdir, trained_with
  )
  with errors.malformed(f"the meta of {path}", "restore it from a copy"):
    tokenizer_lib.take_ends(tokenizer, meta)
  return Checkpoint(workdir, step, config, model, tokenizer, meta)


def config_of(path: str | os.PathLike) -> config_lib.Config:
  """Returns the config of a run, an export or a Hugging Face checkpoint.

  Args:
    path: its folder. No arrays are read.

  Raises:
    UserError: there is none, or it is of a version with other fields.
  """
  for module, known in (
    (read, read.is_export),
    (huggingface, huggingface.is_checkpoint),
  ):
    if known(path):
      return module.config_of(path)
  return workdir_lib.saved_config(os.fspath(path))


def _of_export(
  path: str | os.PathLike, step: int | None, found: read.Exported
) -> Checkpoint:
  own = found.meta["step"]
  if step not in (None, own):
    raise errors.UserError(f"{path} is of step {own}; leave out --step={step}")
  return Checkpoint(
    paths.of(path), own, found.config, found.model, found.tokenizer, found.meta
  )


def scale_text(rotary_scale: float) -> str:
  """Returns "4" for 4.0, and otherwise all digits, for names of results."""
  return str(float(rotary_scale)).removesuffix(".0")


def stretch(checkpoint: Checkpoint, rotary_scale: float) -> Checkpoint:
  """Stretches rotary positions (NTK), for texts beyond the trained length.

  Args:
    checkpoint: a model with rotary channels; it is not changed.
    rotary_scale: length / trained length, see `ProjectionConfig`; it replaces
      the run's.

  Raises:
    UserError: out of range, or the model has no rotary channels to stretch, or
      some that cannot be.
  """
  if not 1 <= rotary_scale < math.inf:
    raise errors.UserError(
      f"--rotary_scale={scale_text(rotary_scale)}: give 1 or more, the length"
      " over the trained length"
    )
  config = copy.deepcopy(checkpoint.config)
  # A single pair of channels has one frequency, which NTK does not change.
  used: list[Any] = [
    config.model.mixers[name] for name in set(config.model.layer_names())
  ]
  rotated = [
    mixer
    for mixer in used
    if (getattr(mixer.at_width(config.model.d_model), "rotary_dim", 0) or 0) > 2
  ]
  fixed = {
    registry.name_of(mixer)
    for mixer in rotated
    if not hasattr(mixer, "rotary_scale")
  }
  if fixed or not rotated:
    why = (
      f"{overview.mixer_names(config.model)} has no rotary channels to stretch"
    )
    if fixed:
      names = ", ".join(sorted(fixed))
      why = f"{names} has rotary channels that cannot be stretched"
    raise errors.UserError(
      f"--rotary_scale={scale_text(rotary_scale)}: {why}; leave the flag out"
    )
  for mixer in rotated:
    mixer.rotary_scale = rotary_scale
  graphdef = abstract.model_of(config.model).graphdef
  model = nnx.merge(graphdef, nnx.split(checkpoint.model)[1])
  return checkpoint._replace(config=config, model=model)
