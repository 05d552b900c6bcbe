"""Reads the config and the parameters of a checkpoint, without training."""

import os
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from memcomp import config as config_lib
from memcomp import errors, integrity, paths, sharding
from memcomp.models import abstract, decoder
from memcomp.runs import workdir

_COMMITTED = "commit_success.txt"  # orbax's
_TRIES = 100
"""Maximum number of checkpoints that a trainer may replace during a read."""


class Read(NamedTuple):
  """The contents of a checkpoint.

  Attributes:
    step: number of training batches.
    meta: saved metadata; "config" is a nested dict, which `workdir.config_of`
      makes a `Config`.
    params: nested dicts of arrays; see `module_of`.
  """

  step: int
  meta: dict[str, Any]
  params: Any


def read(
  path: str | os.PathLike, step: int | None = None, mesh: Mesh | None = None
) -> Read:
  """Reads a checkpoint without its optimizer.

  Args:
    path: a run's workdir, its `checkpoints` folder or one step's folder.
    step: the step to read; None is the newest complete one. Damaged checkpoints
      are then skipped with a message. If a trainer replaces a checkpoint
      meanwhile, the newer one is read.
    mesh: mesh for the parameters; None is one device.

  Raises:
    UserError: there is none, it is damaged, written by another version, or
      `path` is of another step.
  """
  root, named = locate(path)
  if named is not None and step not in (None, named):
    raise errors.UserError(
      f"{path} is of step {named}; leave out --step={step}, or give the folder"
      " of the run"
    )
  step = named if step is None else step
  steps = list_steps(root)
  if step is not None and step not in steps:
    raise errors.UserError(
      f"{root} has no checkpoint of step {step}; it has {steps}"
    )
  for _ in range(_TRIES):
    for candidate in [step] if step is not None else steps[::-1]:
      error, reason = None, None
      try:
        reason = integrity.problem(root / str(candidate))
        if reason is None:
          return _read(root, candidate, mesh)
      except Exception as caught:
        error = caught
      before, steps = steps, list_steps(root)
      if step is None and steps[-1:] != before[-1:]:
        break  # replaced by a newer one, and not damaged
      if error is not None:
        reason = _why_unreadable(root, candidate, error)
      print(f"checkpoint {root / str(candidate)} is damaged ({reason})")
    else:
      raise errors.UserError(
        f"{root} has no whole checkpoint to read; restore one from a copy"
      )
  raise errors.UserError(
    f"{root}: each checkpoint was replaced by the next before it could be read;"
    " raise training.keep_checkpoints or training.checkpoint_every of the run"
  )


def module_of(config: config_lib.Config, params: Any) -> decoder.Decoder:
  """Returns the model of a config with the given parameters."""
  graphdef = abstract.model_of(config.model).graphdef
  return abstract.merge(graphdef, params)


def locate(path: str | os.PathLike) -> tuple[epath.Path, int | None]:
  """Returns the folder of checkpoints at `path`, and a step or None.

  Raises:
    UserError: there is none.
  """
  path = paths.of(path)
  if not paths.is_remote(path) and os.path.islink(path):
    target = path.parent / os.readlink(path)
    # A link to a step says which only in its target.
    path = target if target.name.isdecimal() else path
  # An export has no meta, and its folder may be called anything.
  is_step = (path / "meta").is_dir() or path.parent.name == workdir.CHECKPOINTS
  if path.name.isdecimal() and is_step and (path / "params").is_dir():
    return path.parent, int(path.name)
  for root in (path / workdir.CHECKPOINTS, path):
    if list_steps(root):
      return root, None
  raise errors.UserError(
    f"no checkpoint in {path}; give the --workdir of a run that has saved one"
  )


def _read(root: epath.Path, step: int, mesh: Mesh | None) -> Read:
  path = root / str(step)
  if mesh is None:
    mesh = sharding.one_device()
  readers = _readers(mesh)
  handler = ocp.JsonCheckpointHandler(multiprocessing_options=readers)
  with ocp.Checkpointer(handler, multiprocessing_options=readers) as reader:
    meta = reader.restore(path / "meta")
  with errors.malformed(f"the meta of {path}", "restore it from a copy"):
    config = workdir.config_of(meta["config"], str(root))
    target = abstract.params_of(abstract.model_of(config.model), mesh)
  with ocp.StandardCheckpointer(multiprocessing_options=readers) as reader:
    return Read(step, meta, reader.restore(path / "params", target))


def _readers(mesh: Mesh) -> ocp.options.MultiprocessingOptions:
  """The processes that read together: those of the mesh's devices.

  The first process evaluates alone, after the others have left.
  """
  found = {device.process_index for device in mesh.devices.flat}
  if len(found) == jax.process_count():
    return ocp.options.MultiprocessingOptions()
  return ocp.options.MultiprocessingOptions(
    primary_host=min(found),
    active_processes=found,
    barrier_sync_key_prefix="-".join(map(str, sorted(found))),
  )


def _why_unreadable(root: epath.Path, step: int, error: Exception) -> str:
  """Returns why a checkpoint is unreadable; raises if it is not damaged."""
  # If its files are unchanged, the reader is at fault.
  whole = (root / str(step) / integrity.MANIFEST).exists()
  known = isinstance(error, errors.UserError)
  if whole or known or integrity.of_machine(error):
    raise error
  return " ".join(str(error).split())[:200]


def list_steps(root: epath.Path) -> list[int]:
  """Returns the steps of the committed checkpoints in a folder, in order."""
  if not root.is_dir():
    return []
  return sorted(
    int(path.name)
    for path in root.iterdir()
    if path.name.isdecimal()
    and (path / "params").is_dir()
    # In a bucket, a save has its name from the start, but this file only at the
    # end.
    and (not paths.is_remote(path) or (path / _COMMITTED).exists())
  )
