"""Results slice by slice, a table of all in a folder, and whose they are.

A slice is one setting of a task: a kind of needle at a length, a gap, a
benchmark. Each is written as soon as it is known, so a killed evaluation can
resume.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from memcomp import config as config_lib
from memcomp import disk, errors
from memcomp.evaluation import load, report
from memcomp.models import decoder
from memcomp.runs import workdir

_HEADER = (
  "| task | setting | result | state bytes | model | file |\n"
  "|---|---|---|---|---|---|\n"
)


_WAIT_SECONDS = 60
"""Time to wait for other processes; each writes its slice in milliseconds."""


def _identity(entry: Any) -> Any:
  """Returns the value to compare for an entry of a file.

  For a tokenizer or a text this is the fingerprint: its name is a path, which
  changes if a folder is moved.
  """
  entry = json.loads(json.dumps(entry))
  return entry.get("fingerprint", entry) if isinstance(entry, dict) else entry


def _key(one: dict[str, Any]) -> tuple[Any, Any]:
  """Returns the key of a slice within a file."""
  return one.get("task_hash"), one.get("seed")


class File:
  """A JSON file with slices of one task.

  Attributes:
    path: path of the file.
  """

  def __init__(
    self,
    path: pathlib.Path,
    task: str,
    *,
    about: dict[str, Any],
    model: str,
    same: tuple[str, ...] = (),
    config: config_lib.Config | None = None,
  ):
    """Reads the existing file, if any.

    Args:
      path: path of the file.
      task: name of the task.
      about: entries of the file besides the slices.
      model: name of the evaluated model, for the table.
      same: entries of `about` that must equal those of an existing file.
      config: config of the model; an existing file must have an equivalent one.

    Raises:
      UserError: the file is of another model, or cannot be read.
    """
    self.path = path
    self._task, self._about, self._model = task, about, model
    self._same, self._config = same, config
    self._slices = self._read()

  def _read(self) -> list[dict[str, Any]]:
    """Returns the slices in the file; none if it does not exist."""
    if not self.path.exists():
      return []
    try:
      before = json.loads(self.path.read_text())
      slices = [dict(one) for one in before["slices"]]
    except (OSError, *errors.BAD_JSON, KeyError, TypeError) as error:
      raise _no_result(self.path, self._task) from error
    _check_model(self.path, before, self._about, self._same, self._config)
    return slices

  def find(self, **key: Any) -> dict[str, Any] | None:
    """Returns the slice with these entries, usually `task_hash` and `seed`."""
    for one in self._slices:
      if all(name in one and one[name] == key[name] for name in key):
        return one
    return None

  def find_or_measure(
    self,
    key: dict[str, Any],
    measure: Callable[[], dict[str, Any]],
    *,
    setting: str,
    result: Callable[[dict[str, Any]], str],
  ) -> tuple[dict[str, Any], str]:
    """Returns the slice of a task, and "done before" or "".

    Args:
      key: description of the task, with `task_hash` and `seed`.
      measure: returns the other entries of a new slice, with `state_bytes`.
      setting: see `add`.
      result: maps the slice to figures for the table.

    Raises:
      UserError: no space or no permission, or the slice in the file is damaged.
    """
    done = self.find(**{name: key[name] for name in ("task_hash", "seed")})
    one = key | measure() if done is None else done
    try:
      figures, state_bytes = result(one), int(one["state_bytes"])
    except errors.MALFORMED as error:
      if done is None:
        raise
      raise _no_result(self.path, self._task) from error
    self.add(one, setting=setting, result=figures, state_bytes=state_bytes)
    return one, "" if done is None else "done before"

  def add(
    self,
    one: dict[str, Any],
    *,
    setting: str,
    result: str,
    state_bytes: int,
  ) -> None:
    """Writes a slice to the file, and its line to the table beside it.

    It keeps the slices that other processes have written meanwhile. What is
    there already is not written again; after an interruption only the line may
    be missing.

    Args:
      one: the result, in a form that JSON accepts.
      setting: description of the slice for the table.
      result: figures for the table.
      state_bytes: size of the state of one text.

    Raises:
      UserError: no space or no permission.
    """
    file = self.path.name
    cells = self._task, setting, result, f"{state_bytes:,}", self._model, file
    table = self.path.with_name("results.md")
    if one in self._slices and _with_line(table, cells) is None:
      return
    with disk.locked(
      self.path.with_name(".lock"),
      f"{report.shown(self.path.parent)} is being written",
      wait_seconds=_WAIT_SECONDS,
    ):
      self._slices = self._read()
      if one not in self._slices:
        self._slices = [x for x in self._slices if _key(x) != _key(one)]
        self._slices.append(one)
        report.write_json(self.path, {**self._about, "slices": self._slices})
      add_line(table, cells)


def _check_model(
  path: pathlib.Path,
  before: dict[str, Any],
  about: dict[str, Any],
  same: Sequence[str],
  config: config_lib.Config | None,
) -> None:
  """Raises UserError if a file is of another model; see `File`."""
  other = [
    f"its {what} differs"
    for what in same
    if _identity(before.get(what)) != _identity(about[what])
  ]
  if config is not None and not other:
    saved = before.get("config")
    other = workdir.changes(saved if isinstance(saved, dict) else {}, config)
  if other:
    raise errors.UserError(
      f"{report.shown(path)} holds results of another model"
      f" ({other[0]}); choose another --out"
    )


def _no_result(path: pathlib.Path, task: str) -> errors.UserError:
  return errors.UserError(
    f"{report.shown(path)} is there and is no result of {task}; move it away,"
    " or choose another --out"
  )


class Slices(File):
  """One model's slices of one task: `TASK-stepN.json` of a folder."""

  def __init__(
    self, folder: pathlib.Path, task: str, checkpoint: load.Checkpoint
  ):
    """Reads the existing file, if any.

    Args:
      folder: folder of the results.
      task: name of the task.
      checkpoint: the evaluated model; slices of other weights are rejected.

    Raises:
      UserError: the file is of another model, or cannot be read.
    """
    super().__init__(
      folder / f"{task}-step{checkpoint.step}.json",
      task,
      about=describe(checkpoint),
      model=report.model_label(checkpoint, step=True),
      same=("name", "weights", "tokenizer"),
      config=checkpoint.config,
    )


def check_own(
  path: pathlib.Path, task: str, checkpoint: load.Checkpoint
) -> dict[str, Any]:
  """Checks that a result of this model may be written to `path`.

  Its own may be replaced, also that of an earlier step: the file is of the
  newest, and a run goes on.

  Args:
    path: path of the file.
    task: name of the task, and of its entry in the file.
    checkpoint: the model to evaluate.

  Returns:
    `describe(checkpoint)`, for the new result.

  Raises:
    UserError: the file is of another model, or no result of the task.
  """
  about = describe(checkpoint)
  if not path.exists():
    return about
  try:
    before = json.loads(path.read_text())
    step, _ = before["step"], before[task]
  except (OSError, *errors.BAD_JSON, KeyError, TypeError) as error:
    raise _no_result(path, task) from error
  same = ["name", "tokenizer"]
  # Results of earlier versions lack the weights.
  if step == about["step"] and "weights" in before:
    same.append("weights")
  _check_model(path, before, about, same, checkpoint.config)
  return about


def describe(checkpoint: load.Checkpoint) -> dict[str, Any]:
  """Returns the description of a model in results, and of its weights."""
  return report.describe(checkpoint) | {"weights": weights(checkpoint.model)}


def weights(model: decoder.Decoder) -> str:
  """Returns 16 hex digits; equal for equal parameters."""
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(nnx.split(model)[1]):
    digest.update(np.ascontiguousarray(leaf).view(np.uint8))
  return digest.hexdigest()[:16]


def add_line(path: pathlib.Path, cells: tuple[str, ...]) -> None:
  """Adds a line to a table, replacing one of the same task, setting and model.

  Args:
    path: path of the table, which is created if needed.
    cells: task, setting, result, state bytes, model, file.

  Raises:
    UserError: no space or no permission.
  """
  text = _with_line(path, cells)
  if text is not None:
    report.write_text(path, text)


def _with_line(path: pathlib.Path, cells: tuple[str, ...]) -> str | None:
  """The table with a line of these cells; None if it has that line."""
  lines = []
  if path.exists():
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    lines = text.splitlines(keepends=True)
  own = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]

  def same(line):
    other = line.strip().removeprefix("| ").removesuffix(" |").split(" | ")
    return len(other) == len(own) and all(
      other[i] == own[i] for i in (0, 1, 4, 5)
    )

  new = f"| {' | '.join(own)} |\n"
  if new in lines:
    return None
  kept = [line for line in lines if not same(line)] or [_HEADER]
  return "".join([*kept, new])
