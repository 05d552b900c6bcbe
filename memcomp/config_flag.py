"""The flag --config: loads configs, lists their fields, explains mistakes."""

import dataclasses
import difflib
import pathlib
import traceback
from typing import Any

from absl import flags

from memcomp import errors, named_configs


def load_config(path: str) -> Any:
  """Runs `get_config` of a config.

  Args:
    path: path of its file, or name of a config that comes with memcomp; both
      may end in `:argument`.

  Raises:
    UserError: the config does not exist, raises (with the line number), or
      returns something else.
  """
  name, _, argument = named_configs.path_of(path).partition(":")
  file = pathlib.Path(name)
  if not file.is_file():
    near = difflib.get_close_matches(
      file.name, [p.name for p in file.parent.glob("*.py")], n=3
    )
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise errors.UserError(
      f"--config={path}: no such file{hint or '; give the path of a config'}"
    )
  scope: dict[str, Any] = {"__name__": "config", "__file__": str(file)}
  try:
    # Python detects the encoding of the bytes, as for every module.
    exec(compile(file.read_bytes(), str(file), "exec"), scope)
    if "get_config" not in scope:
      raise errors.UserError(
        f"--config={path}: it has no get_config(); see configs/ for examples"
      )
    found = scope["get_config"](*([argument] if argument else []))
  except errors.UserError:
    raise
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == str(file)]
    line = error.lineno if isinstance(error, SyntaxError) else None
    where = f"{file}:{line or (lines or ['?'])[-1]}"
    raise errors.UserError(
      f"{where}: {type(error).__name__}: {error}; fix the config file"
    ) from error
  from memcomp import config as config_lib

  if not isinstance(found, config_lib.Config):
    raise errors.UserError(
      f"--config={path}: get_config() returned {type(found).__name__}; return a"
      " memcomp.config.Config"
    )
  return found


def field_paths(config: Any, prefix: str = "") -> dict[str, Any]:
  """Returns `training.steps` -> value for every field of a config.

  Args:
    config: a dataclass, or a dict of dataclasses by name.
    prefix: prefix of the paths.
  """
  if isinstance(config, dict):
    members = config
  else:
    fields = dataclasses.fields(config)
    members = {field.name: getattr(config, field.name) for field in fields}
  found = {}
  for name, value in members.items():
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
      found |= field_paths(value, f"{prefix}{name}.")
    else:
      found[prefix + name] = value
  return found


def value_of(name: str, argv: list[str]) -> str | None:
  """Returns the value that `argv` gives to a flag, or None."""
  index = _index_of(name, argv)
  if index < 0:
    return None
  _, equals, value = argv[index].partition("=")
  if equals:
    return value
  return argv[index + 1] if index + 1 < len(argv) else None


def with_path(argv: list[str]) -> list[str]:
  """Returns `argv` with the path of a config that is given by its name.

  Raises:
    UserError: there are two configs.
  """
  value = value_of("config", argv)
  if value is None:
    return argv
  index = _index_of("config", argv)
  if value_of("config", argv[index + 1 :]) is not None:
    raise errors.UserError("--config is given twice; give one config")
  flag, equals, _ = argv[index].partition("=")
  path = named_configs.path_of(value)
  given = [f"{flag}={path}"] if equals else [flag, path]
  return [*argv[:index], *given, *argv[index + len(given) :]]


def explain(error: Exception, argv: list[str]) -> str:
  """Returns cause and fix of a failed parse."""
  path = value_of("config", argv)
  if path is None:
    if any(_is_override(arg) for arg in argv):
      return (
        "fields of a config are set but no config is named; add --config=FILE"
      )
    return _unknown_flag(argv) or str(error)
  config = load_config(path)
  for arg in filter(_is_override, argv):
    if message := _field_problem(config, arg, argv):
      return message
  first = next((a for a in argv if _is_override(a)), "")
  if first and argv.index(first) < _index_of("config", argv):
    return f"{first} comes before --config; put --config first"
  return _unknown_flag(argv) or str(error)


def _field_problem(config: Any, arg: str, argv: list[str]) -> str | None:
  """Returns the problem with one --config.a.b=value, or None."""
  name, equals, value = arg.partition("=")
  path = name.split(".", 1)[1]
  fields = field_paths(config)
  if path not in fields:
    found = _value_at(config, path)
    if dataclasses.is_dataclass(found) or isinstance(found, dict):
      return (
        f"{name} is a group of fields; set one of them, as {name}.NAME=VALUE"
      )
    if found is None:
      return f"{name}: there is no such field; {_suggest(path, fields)}"
    fields[path] = found
  if not equals:
    following = argv[argv.index(arg) + 1 :][:1]
    if isinstance(fields[path], bool):
      return None
    if not following:
      return f"{name} has no value; write {name}=VALUE"
    value = following[0]
  from memcomp import config as config_lib

  kind = type(fields[path])
  if not _parses(kind, value):
    return (
      f"{name}={value}: it takes {config_lib.type_name(kind)}, not {value!r}; "
      f"for example {name}={fields[path]}"
    )
  return None


def _value_at(config: Any, path: str) -> Any:
  """Returns the value at a path of attributes and dict keys, or None.

  Attributes need not be fields: for example `model.mixer`, see
  `models.legacy_mixers`.
  """
  for name in path.split("."):
    if isinstance(config, dict):
      config = config.get(name)
    elif dataclasses.is_dataclass(config):
      config = getattr(config, name, None)
    else:
      return None
  return None if callable(config) else config


def _parses(kind: type, value: str) -> bool:
  if kind is bool:
    return value.lower() in ("true", "false", "t", "f", "1", "0")
  if kind in (int, float):
    try:
      kind(value)
    except ValueError:
      return False
  return True


def _suggest(path: str, fields: dict[str, Any]) -> str:
  last = path.rsplit(".", 1)[-1]
  near = [field for field in fields if field.rsplit(".", 1)[-1] == last]
  close = difflib.get_close_matches(path, fields, n=3, cutoff=0.6)
  near += [field for field in close if field not in near]
  if near:
    return f"did you mean {' or '.join(near[:3])}?"
  return "--help with the --config lists every field"


def _unknown_flag(argv: list[str]) -> str | None:
  known = [name for name in flags.FLAGS if not name.startswith("config.")]
  for arg in argv[1:]:
    name = arg.lstrip("-").split("=", 1)[0]
    if not arg.startswith("-") or _is_override(arg) or name in known:
      continue
    if name.removeprefix("no") in known:
      continue
    near = difflib.get_close_matches(name.split(".")[0], known, n=1)
    hint = f"did you mean --{near[0]}?" if near else "--help lists the flags"
    return f"{arg}: there is no such flag; {hint}"
  return None


def _is_override(arg: str) -> bool:
  return arg.lstrip("-").removeprefix("no").startswith("config.") and (
    arg.startswith("-")
  )


def _index_of(name: str, argv: list[str]) -> int:
  for index, arg in enumerate(argv):
    if arg.startswith("-") and arg.lstrip("-").split("=", 1)[0] == name:
      return index
  return -1
