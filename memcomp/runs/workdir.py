"""A run's folder, and whether a config may continue the run there.

config.json    the resolved config
metrics.jsonl  one object per logged step
tokenizer.json the run's tokenizer, unless it is bytes
checkpoints/   one folder per step
damaged/       checkpoints that failed their checksums
stacks-N.txt   stacks of the threads of process N, if it hung
tensorboard/   profile/   loss.png
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import typing
from typing import Any

from memcomp import config as config_lib
from memcomp import disk, errors, paths
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.data.synthetic import task as task_lib
from memcomp.data.synthetic import tasks
from memcomp.layers import options, registry
from memcomp.models import decoder, legacy_mixers

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
CHECKPOINTS = "checkpoints"
DAMAGED = "damaged"

_FREE = (
  "evaluation",
  "data.tokenizer",  # its fingerprint is compared instead
  "data.chat_template",  # the fingerprint of the data depends on it
  "mesh",
  "model.remat",
  "data.prefetch",
  "training.max_nonfinite_steps",
  "training.log_every",
  "training.evaluate_every",
  "training.evaluate_batches",
  "training.checkpoint_every",
  "training.keep_checkpoints",
  "training.watchdog_seconds",
  "training.profile_start",
  "training.profile_steps",
  "training.tensorboard",
)
"""Fields that may change when resuming, because results do not depend on
them."""


_SHOWN = 8
"""Maximum number of changed fields in a message."""

_BY_NAME = {
  options.MixerConfig: registry.config_of,
  task_lib.TaskConfig: tasks.config_of,
}
"""Finds the class of a saved config by its "name"."""


def differences(
  saved: Any,
  current: Any,
  prefix: str = "",
  words: str = "{} was {!r}, is {!r}",
) -> list[str]:
  """Returns the differing fields of two nested dicts, as printable lines."""
  if isinstance(saved, dict) and isinstance(current, dict):
    found = []
    for key in sorted(saved.keys() | current.keys()):
      found += differences(
        saved.get(key, "(absent)"),
        current.get(key, "(absent)"),
        f"{prefix}.{key}" if prefix else key,
        words,
      )
    return found
  # Compare as JSON, because a tuple is read back as a list.
  if json.dumps(saved, sort_keys=True) == json.dumps(current, sort_keys=True):
    return []
  return [words.format(prefix, saved, current)]


def of_this_version(
  saved: Any, kind: type = config_lib.Config, *, like: Any = None
) -> Any:
  """Returns a saved config in the format of this version.

  Fields that an older version lacks get what it did: their defaults, or the
  values in `MixerConfig.earlier`. A config that this
  version cannot read stays unchanged.

  Args:
    saved: output of `config.to_dict`, read from disk.
    kind: class of the config.
    like: a config of this class. If the models differ only in the names of
      mixers, its names are used. None keeps the names.
  """
  with contextlib.suppress(errors.UserError, *errors.MALFORMED):
    found = _build(kind, saved, "saved")
    # Other checks report an invalid pattern.
    with contextlib.suppress(ValueError):
      if isinstance(like, decoder.DecoderConfig):
        found = legacy_mixers.rename_like(found, like)
      elif isinstance(like, config_lib.Config):
        found.model = legacy_mixers.rename_like(found.model, like.model)
    return config_lib.to_dict(found)
  return saved


def changes(saved: Any, current: Any, *, prefix: str = "") -> list[str]:
  """Returns the differences of a saved config from `current`.

  Fields that results do not depend on may differ, and so may mixer names.

  Args:
    saved: see `of_this_version`.
    current: a config or a part of one, of the same class.
    prefix: path of that part in the whole config, such as "model".

  Returns:
    One line per field.
  """
  saved = of_this_version(saved, type(current), like=current)
  return [
    line
    for line in differences(saved, config_lib.to_dict(current), prefix)
    if not is_free(line.split(" ", 1)[0])
  ]


def check_same(
  saved: dict[str, Any], config: config_lib.Config, where: str
) -> None:
  """Checks that `config` may continue a run with the config `saved`.

  Raises:
    UserError: naming each changed field that must not change, see `changes`.
  """
  changed = changes(saved, config)
  if not changed:
    return
  what = "config"
  if any(line.startswith("model.") for line in changed):
    what = "model"
  shown = "; ".join(changed[:_SHOWN])
  if more := len(changed[_SHOWN:]):
    shown += f"; and {more} more"
  raise errors.UserError(
    f"{where} holds a run with another {what} ({shown}): set the fields back to"
    " continue it, or choose another --workdir"
  )


def config_of(saved: dict[str, Any], where: str) -> config_lib.Config:
  """Returns the config from an output of `config.to_dict`.

  Raises:
    UserError: it was written by a version with other fields.
  """
  with errors.malformed(f"the config of {where}", "restore it from a copy"):
    config = _build(config_lib.Config, saved, where)
    config_lib.check_types(config)
  return config


def saved_config(folder: str | pathlib.Path) -> config_lib.Config:
  """Returns the config of the run in a folder.

  Raises:
    UserError: there is none, or it is of a version with other fields.
  """
  path = pathlib.Path(folder) / CONFIG
  if not path.exists():
    raise errors.UserError(f"{path} is missing; give the folder of a run")
  return config_of(_read(path), str(folder))


def keep_tokenizer(
  place: str | os.PathLike, tokenizer: tokenizer_lib.Tokenizer
) -> None:
  """Saves a tokenizer's file beside the checkpoints that need it.

  Raises:
    UserError: no space or permission.
  """
  if not isinstance(tokenizer, tokenizer_lib.JsonTokenizer):
    return
  path = paths.of(place) / TOKENIZER
  with disk.clear_errors(f"cannot write {path}"):
    if path.exists() and path.read_bytes() == tokenizer.content:
      return
    if paths.is_remote(path):
      path.write_bytes(tokenizer.content)
      return
    with disk.replacing(pathlib.Path(path)) as temporary:
      temporary.write_bytes(tokenizer.content)


def check_tokenizer(
  place: str | os.PathLike, tokenizer: tokenizer_lib.Tokenizer
) -> None:
  """Checks that a new run would not overwrite another tokenizer.json.

  Raises:
    UserError: the folder has another file of that name.
  """
  if not isinstance(tokenizer, tokenizer_lib.JsonTokenizer):
    return
  path = paths.of(place) / TOKENIZER
  with disk.clear_errors(f"cannot read {path}"):
    same = not path.exists() or path.read_bytes() == tokenizer.content
  if not same:
    raise errors.UserError(
      f"{path} is another tokenizer than data.tokenizer ({tokenizer.name}), and"
      " a run keeps its own there; move it away, or choose another --workdir or"
      " --checkpoints"
    )


def load_tokenizer(
  name: str, place: str | os.PathLike, fingerprint: str | None = None
) -> tokenizer_lib.Tokenizer:
  """Loads a run's tokenizer.

  Args:
    name: tokenizer of the config.
    place: folder of the checkpoints, which has a copy.
    fingerprint: fingerprint of the tokenizer in training. None accepts the
      named file, or the copy if that file is gone.

  Raises:
    UserError: it is gone, or has changed.
  """
  kept = paths.of(place) / TOKENIZER
  given = [name]
  if name not in tokenizer_lib.WITHOUT_FILE and kept.exists():
    given = [name, str(kept)] if fingerprint is None else [str(kept), name]
  problem = None
  for one in given:
    try:
      found = tokenizer_lib.load(one)
    except errors.UserError as error:
      problem = problem or error
      continue
    if fingerprint in (None, found.fingerprint):
      return found
    problem = errors.UserError(
      f"{os.fspath(place)} was trained with another tokenizer: {name} has"
      " changed since; restore the file"
    )
  assert problem is not None
  raise problem


def has_begun(workdir: pathlib.Path) -> bool:
  """Whether a run in the folder has left anything: a log, checkpoints, results.

  One that was killed or out of memory in its first step has not.
  """
  names = ("metrics.jsonl", CHECKPOINTS, "eval")
  return any(_has_content(workdir / name) for name in names)


def _has_content(path: pathlib.Path) -> bool:
  if path.is_dir():
    return any(path.iterdir())
  return path.exists() and path.stat().st_size > 0


def check(workdir: pathlib.Path, config: config_lib.Config) -> None:
  """Checks that the folder is unused, or of this very run.

  Raises:
    UserError: it has another run, or files that are not a run's.
  """
  if workdir.exists() and not workdir.is_dir():
    raise errors.UserError(f"{workdir} is a file; choose another --workdir")
  for place in (workdir.absolute(), workdir.resolve()):
    for folder in (place, *place.parents):
      if folder.name == CHECKPOINTS and _is_run(folder.parent):
        raise errors.UserError(
          f"{workdir} is among the checkpoints of the run {folder.parent},"
          " which removes old ones; choose another --workdir"
        )
  path = workdir / CONFIG
  if path.exists():
    saved = _read(path)
    if "format" in saved:
      raise errors.UserError(
        f"{workdir} holds an exported model; choose another --workdir"
      )
    if not _of_run(saved):
      raise errors.UserError(f"{path} is no run's; choose another --workdir")
    if has_begun(workdir):
      check_same(saved, config, str(workdir))
  else:
    for name in ("metrics.jsonl", CHECKPOINTS):
      if _has_content(workdir / name):
        raise errors.UserError(
          f"{workdir} holds {name} but no config.json, so it cannot be told "
          "whose it is; choose another --workdir"
        )


def _is_run(folder: pathlib.Path) -> bool:
  try:
    return _of_run(_read(folder / CONFIG))
  except (OSError, errors.UserError):
    return False


def _of_run(saved: dict[str, Any]) -> bool:
  return {"model", "data", "training"} <= saved.keys()


def _read(path: pathlib.Path) -> dict[str, Any]:
  return paths.read_json(path, "restore it, or choose another --workdir")


def is_free(field: str) -> bool:
  """Whether results do not depend on a field of the config."""
  return any(field == free or field.startswith(free + ".") for free in _FREE)


def _build(cls: type, saved: dict[str, Any], where: str) -> Any:
  """Rebuilds a dataclass from a nested dict, following its type hints."""
  if cls in _BY_NAME:
    try:
      cls = _BY_NAME[cls](saved["name"])
    except (KeyError, ValueError) as error:
      raise errors.UserError(
        f"{where} was written by another version: {error}; use that version"
      ) from error
    saved = {name: value for name, value in saved.items() if name != "name"}
  if cls is decoder.DecoderConfig:
    saved = legacy_mixers.upgrade(saved)
  hints = typing.get_type_hints(cls)
  names = {field.name for field in dataclasses.fields(cls)}
  if unknown := sorted(saved.keys() - names):
    raise errors.UserError(
      f"{where} was written by another version: its config has "
      f"{', '.join(unknown)}, which {cls.__name__} has not; use that version"
    )
  values: dict[str, Any] = dict(getattr(cls, "earlier", {}))
  for name, value in saved.items():
    hint = hints[name]
    for known in _BY_NAME:
      hint = known if hint == known | None else hint
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
      value = _build(hint, value, where)
    elif typing.get_origin(hint) is dict:
      kind = typing.get_args(hint)[1]
      value = {key: _build(kind, entry, where) for key, entry in value.items()}
    elif isinstance(value, list) and typing.get_origin(hint) is tuple:
      value = tuple(value)
    values[name] = value
  return cls(**values)
