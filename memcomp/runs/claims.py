"""A run's claim of its folders, which keeps other processes out."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from etils import epath

from memcomp import config as config_lib
from memcomp import disk, errors, integrity, lock, paths
from memcomp.runs import workdir as workdir_lib

_LOCK = ".lock"
_WAIT_SECONDS = 60
"""Time for a shared disk to show what another machine has written."""


@contextlib.contextmanager
def claim(
  workdir: pathlib.Path,
  config: config_lib.Config,
  checkpoints: epath.Path | None = None,
) -> Iterator[None]:
  """Claims the folder for this run, and keeps other processes out.

  The locks end with the process, however that ends.

  Args:
    workdir: folder of the run.
    config: config of the run.
    checkpoints: folder of the checkpoints, if not in `workdir`.

  Raises:
    UserError: another process holds it; no space or permission.
  """
  folders = {workdir.resolve()}
  if checkpoints is not None and not paths.is_remote(checkpoints):
    folders.add(pathlib.Path(checkpoints).resolve())
  with contextlib.ExitStack() as stack:
    for folder in sorted(folders):
      with disk.clear_errors(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
      stack.enter_context(disk.locked(folder / _LOCK, f"{folder} is in use"))
    path = workdir / workdir_lib.CONFIG
    with disk.clear_errors(f"cannot write {workdir}"):
      integrity.replace_text(path, config_lib.to_json(config))
    yield


def claimed_by(checkpoints: epath.Path) -> str:
  """Returns who has claimed a folder of checkpoints, equal in all processes.

  Raises:
    UserError: this process sees no claim.
  """
  if paths.is_remote(checkpoints):
    return os.fspath(checkpoints)
  found = lock.holder(checkpoints / _LOCK, wait_seconds=_WAIT_SECONDS)
  if found is None:
    raise errors.UserError(
      f"{checkpoints}: this process does not see what process 0 writes there;"
      " put --workdir, or --checkpoints, on a disk that all processes share"
    )
  return found
