"""Opens a checkpoint for evaluation."""

import pathlib
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from memcomp import config as config_lib
from memcomp import errors
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.models import decoder
from memcomp.training import integrity
from memcomp.training import load as load_lib


class Checkpoint(NamedTuple):
  """A trained model and what belongs to it.

  Attributes:
    workdir: of its run.
    step: batches it was trained on.
    config: of its run.
    model: on one device.
    tokenizer: the one it was trained with.
    meta: what was saved beside the arrays, see `training.run`.
  """

  workdir: pathlib.Path
  step: int
  config: config_lib.Config
  model: decoder.Decoder
  tokenizer: tokenizer_lib.Tokenizer
  meta: dict[str, Any]


def open_checkpoint(
  path: str | pathlib.Path, step: int | None = None
) -> Checkpoint:
  """Reads a checkpoint.

  Args:
    path: a run's workdir, its `checkpoints` folder or one step's folder.
    step: which; None is the newest that is whole.

  Raises:
    UserError: none there, damaged, or its tokenizer is gone or has changed.
  """
  root, named = load_lib.locate(path)
  if step is None:
    step = named if named is not None else _newest_whole(root)
  config, model = load_lib.load_model(root, step)
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    meta = reader.restore(root / str(step) / "meta")
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  if tokenizer.fingerprint != meta["tokenizer"]:
    raise errors.UserError(
      f"{path} was trained with another tokenizer: {config.data.tokenizer} "
      "has changed since; restore the file"
    )
  workdir = root.parent if root.name == "checkpoints" else root
  return Checkpoint(workdir, step, config, model, tokenizer, meta)


def _newest_whole(root: pathlib.Path) -> int:
  """Returns the step that `load_model` would choose, to have its number."""
  steps = [int(p.name) for p in root.iterdir() if p.name.isdecimal()]
  for step in sorted(steps, reverse=True):
    reason = integrity.problem(root / str(step))
    if reason is None:
      return step
    print(f"checkpoint {root / str(step)} is damaged ({reason})")
  raise errors.UserError(
    f"{root} has no whole checkpoint to read; restore one from a copy"
  )
