"""Checkpoints: a wrapper around orbax's CheckpointManager.

A step's folder has the items `params`, `state` (the rest of the training
state), `data` (the loader's position), `meta` (the resolved config, versions
and fingerprints) and checksums of all files. Saves run in the background. A
rename commits them, or a file in a bucket. The next `poll` raises their errors.
"""

import contextlib
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from memcomp import disk, errors, integrity, paths
from memcomp.layers import solved
from memcomp.runs import workdir
from memcomp.training import processes
from memcomp.training import state as state_lib


class Restored(NamedTuple):
  """A restored checkpoint.

  Attributes:
    step: number of training batches.
    state: `state.TrainState`, on the mesh of its target.
    data: result of the loader's `state`.
    meta: see `Checkpoints.save`.
  """

  step: int
  state: state_lib.TrainState
  data: dict[str, Any]
  meta: dict[str, Any]


class Checkpoints:
  """The checkpoints of a run, for the process that writes them.

  Attributes:
    place: folder that has the folder of checkpoints.
  """

  def __init__(self, directory: str | os.PathLike, *, keep: int):
    """Opens `<directory>/checkpoints`, and removes remains of killed saves.

    Args:
      directory: folder of the run, or of its checkpoints in a bucket.
      keep: number of newest checkpoints to keep, >= 1.

    Raises:
      UserError: it cannot be written.
    """
    self.place = paths.of(directory)
    self._root = self.place / workdir.CHECKPOINTS
    self._aside = self.place / workdir.DAMAGED
    self._saving: int | None = None
    self._hashing: threading.Thread | None = None
    self._hash_error: Exception | None = None
    with disk.clear_errors(f"cannot write {self._root}"):
      self._manager = ocp.CheckpointManager(
        self._root,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=checkpoint_managers.LatestN(keep),
          cleanup_tmp_directories=True,
        ),
      )

  def check_writable(self) -> None:
    """Raises UserError if the first process could not save.

    Orbax writes nothing before the first save, which would be late. A bucket is
    not asked.
    """
    if processes.is_first() and not paths.is_remote(self._root):
      with disk.clear_errors(f"cannot write {self._root}"):
        tempfile.TemporaryFile(dir=self._root).close()

  def steps(self) -> list[int]:
    """Returns the steps of the committed checkpoints, oldest first."""
    return sorted(self._manager.all_steps())

  def save(
    self,
    step: int,
    state: state_lib.TrainState,
    data: dict[str, Any],
    meta: dict[str, Any],
  ) -> None:
    """Starts a save; returns once `state` may be donated.

    Args:
      step: number of training batches.
      state: state to save.
      data: the loader's position, for JSON.
      meta: `config` (nested dict) and other metadata of the run.

    Raises:
      UserError: no space or permission for this or the previous save.
    """
    self.wait()
    with disk.clear_errors(f"cannot write {self._root}"):
      self._manager.save(
        step,
        args=ocp.args.Composite(
          params=ocp.args.StandardSave(state.params),
          state=ocp.args.StandardSave(_rest(state)),
          data=ocp.args.JsonSave(data),
          meta=ocp.args.JsonSave(meta),
        ),
      )
    self._saving = step

  def poll(self) -> None:
    """Raises the error of a background save; returns at once."""
    if self._saving is not None and not self._manager.is_saving_in_progress():
      self._finish()
    if self._hash_error is not None:
      error, self._hash_error = self._hash_error, None
      with disk.clear_errors(f"cannot write {self._root}"):
        raise error

  def wait(self) -> None:
    """Waits until every save is on disk with its checksums."""
    self._finish()
    if self._hashing is not None:
      self._hashing.join()
    self.poll()

  def restore(
    self, target: state_lib.TrainState, check: Callable[[dict], None]
  ) -> Restored | None:
    """Reads the newest complete checkpoint; moves damaged ones away.

    Args:
      target: `ShapeDtypeStruct`s with shardings, on any mesh.
      check: called with the checkpoint's meta before any array is read.

    Returns:
      The checkpoint; None if there has never been one.

    Raises:
      UserError: every checkpoint is damaged; also errors of `check`.
    """
    for step in reversed(self.steps()):
      path = self._root / str(step)
      reason = None
      if processes.is_first():
        reason = integrity.problem(path) or integrity.unreadable(path)
      if processes.of_first(reason is None):
        try:
          return self._read(step, target, check)
        except errors.UserError:
          raise
        except Exception as error:
          whole = (path / integrity.MANIFEST).exists() or paths.is_remote(path)
          # Else the files are unchanged, so the reader is at fault.
          if whole or not processes.is_alone() or integrity.of_machine(error):
            raise
          reason = " ".join(str(error).split())[:200]
      print(
        f"checkpoint {path} is damaged ({reason}); moved to {self._aside}, "
        "trying the one before",
        flush=True,
      )
      self._set_aside(step)
    # Also what an earlier start set aside: a restart must not begin anew.
    if processes.of_first(any(self._aside.glob("*"))):
      raise errors.UserError(
        f"every checkpoint of {self._root} is damaged (see {self._aside}); "
        "restore one from a copy, or start anew with another --workdir"
      )
    return None

  def close(self) -> None:
    """Waits for the saves and ends the background threads."""
    try:
      self.wait()
    finally:
      with disk.clear_errors(f"cannot write {self._root}"):
        self._manager.close()
      # Orbax does not wait for the thread that removes remains of killed saves.
      # At the end of the process it would print a traceback. What it could not
      # remove is no error unless something is saved.
      cleanup = getattr(self._manager, "_cleanup_tmp_directory_future", None)
      if cleanup is not None:
        with contextlib.suppress(OSError):
          cleanup.result()

  def _finish(self) -> None:
    """Finishes a save: raises its error, or starts its checksums."""
    step, self._saving = self._saving, None
    if step is None:
      return
    with disk.clear_errors(f"cannot write {self._root}"):
      self._manager.wait_until_finished()
    # A bucket has its own checksums, and reading objects back would cost.
    if not processes.is_first() or paths.is_remote(self._root):
      return

    def write():
      try:
        integrity.write(pathlib.Path(self._root / str(step)))
      except Exception as error:
        self._hash_error = error

    self._hashing = threading.Thread(target=write, name="checksums")
    self._hashing.start()

  def _read(self, step, target, check) -> Restored:
    read = self._manager.restore
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    meta = read(step, args=args)["meta"]
    check(meta)

    def arrays(state):
      return read(
        step,
        args=ocp.args.Composite(
          params=ocp.args.StandardRestore(target.params),
          state=ocp.args.StandardRestore(state),
          data=ocp.args.JsonRestore(),
        ),
      )

    try:
      found = arrays(_rest(target))
    except ValueError as error:
      if ".mixer.stats" not in str(error):
        raise
      found = arrays(_with_stats(_rest(target)))
    state = _without_stats(
      target._replace(params=found["params"], **found["state"])
    )
    return Restored(step, state, found["data"], meta)

  def _set_aside(self, step: int) -> None:
    if processes.is_first():
      self._aside.mkdir(exist_ok=True)
      number = sum(1 for _ in self._aside.glob(f"{step}-*"))
      (self._root / str(step)).rename(self._aside / f"{step}-{number}")
    processes.wait(f"checkpoint {step} set aside")
    self._manager.reload()


def _rest(state: state_lib.TrainState) -> dict[str, Any]:
  fields = state._asdict()
  del fields["params"]
  # Omit None, because orbax has no type for an empty item.
  return {k: v for k, v in fields.items() if v is not None}


class _SolvedStateWithStats(NamedTuple):
  """What `solved.SolvedState` was: it had a place for statistics."""

  query_taps: Any
  key_taps: Any
  value_taps: Any
  memory: Any
  stats: None = None


def _with_stats(tree: Any) -> Any:
  """The tree as checkpoints had it while states held statistics."""
  return jax.tree.map(
    lambda x: (
      _SolvedStateWithStats(*x) if isinstance(x, solved.SolvedState) else x
    ),
    tree,
    is_leaf=lambda x: isinstance(x, solved.SolvedState),
  )


def _without_stats(tree: Any) -> Any:
  return jax.tree.map(
    lambda x: (
      solved.SolvedState(*x[:-1]) if isinstance(x, _SolvedStateWithStats) else x
    ),
    tree,
    is_leaf=lambda x: isinstance(x, _SolvedStateWithStats),
  )
