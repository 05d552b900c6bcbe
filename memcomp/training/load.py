"""Reading a checkpoint without training: its config and its parameters."""

import os
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from memcomp import config as config_lib
from memcomp import errors, paths, sharding
from memcomp.models import decoder
from memcomp.training import integrity, workdir
from memcomp.training import state as state_lib

_COMMITTED = "commit_success.txt"  # orbax's


def latest_step(path: str | os.PathLike) -> int | None:
  """Returns the newest step under a workdir, or None without any."""
  try:
    root, step = locate(path)
  except errors.UserError:
    return None
  return max(list_steps(root)) if step is None else step


def load_params(
  path: str | os.PathLike, step: int | None = None, mesh: Mesh | None = None
) -> tuple[dict[str, Any], Any]:
  """Reads the parameters of a checkpoint; the optimizer stays on disk.

  Args:
    path: a run's workdir, its `checkpoints` folder or one step's folder.
    step: which; None is the newest that is whole: a damaged one is passed over
      with a line saying so, unless it was asked for.
    mesh: to put the parameters on; None is one device.

  Returns:
    The config as a nested dict (`workdir.config_of` makes it a `Config`), and
    the parameters as nested dicts of arrays (`state.merge(graphdef, params)`).

  Raises:
    UserError: nothing there, damaged, or written by another version.
  """
  root, named = locate(path)
  step = named if step is None else step
  steps = list_steps(root)
  if step is not None and step not in steps:
    raise errors.UserError(
      f"{root} has no checkpoint of step {step}; it has {steps}"
    )
  for candidate in [step] if step is not None else steps[::-1]:
    reason = integrity.problem(root / str(candidate))
    if reason is None:
      return _read(root, candidate, mesh)
    print(f"checkpoint {root / str(candidate)} is damaged ({reason})")
  raise errors.UserError(
    f"{root} has no whole checkpoint to read; restore one from a copy"
  )


def load_model(
  path: str | os.PathLike, step: int | None = None, mesh: Mesh | None = None
) -> tuple[config_lib.Config, decoder.Decoder]:
  """Reads a checkpoint as its config and a module; see `load_params`."""
  saved, params = load_params(path, step, mesh)
  config = workdir.config_of(saved, str(path))
  graphdef = state_lib.abstract_model(config.model).graphdef
  return config, state_lib.merge(graphdef, params)


def locate(path: str | os.PathLike) -> tuple[epath.Path, int | None]:
  """Returns the folder of checkpoints that `path` means, and a step or None.

  Raises:
    UserError: there is none.
  """
  path = paths.of(path)
  if path.name.isdecimal() and (path / "params").is_dir():
    return path.parent, int(path.name)
  for root in (path / "checkpoints", path):
    if list_steps(root):
      return root, None
  raise errors.UserError(
    f"no checkpoint in {path}; give the --workdir of a run that has saved one"
  )


def _read(
  root: epath.Path, step: int, mesh: Mesh | None
) -> tuple[dict[str, Any], Any]:
  path = root / str(step)
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
    saved = reader.restore(path / "meta")["config"]
  config = workdir.config_of(saved, str(root))
  if mesh is None:
    mesh = sharding.one_device()
  target = state_lib.abstract_params(
    state_lib.abstract_model(config.model), mesh
  )
  with ocp.StandardCheckpointer() as reader:
    return saved, reader.restore(path / "params", target)


def list_steps(root: epath.Path) -> list[int]:
  """Returns the steps of the committed checkpoints in a folder, in order."""
  if not root.is_dir():
    return []
  return sorted(
    int(path.name)
    for path in root.iterdir()
    if path.name.isdecimal()
    and (path / "params").is_dir()
    # In a bucket a save has its name from the start, and this file at the end.
    and (not paths.is_remote(path) or (path / _COMMITTED).exists())
  )
