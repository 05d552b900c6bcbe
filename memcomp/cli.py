"""Command lines: every mistake in the input becomes one clear line.

    if __name__ == "__main__":
      cli.main(program, usage=__doc__)

`program` reads absl flags and returns an exit code. Mistakes of the user (bad
flags or configs, `errors.UserError`) and failures of the machine
(`errors.explain`) exit with `errors.EXIT_BAD_INPUT` and one line on stderr. A
bug keeps its traceback. Ctrl-C and SIGTERM let every context clean up. Programs
with other flags call `guard`.
"""

import contextlib
import dataclasses
import difflib
import functools
import logging
import os
import pathlib
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import flags
from absl import logging as absl_logging

from memcomp import errors, named_configs, paths, streams

EXIT_INTERRUPTED = 130
"""Exit code: Ctrl-C or SIGTERM with nothing to save (128 + SIGINT)."""


class _PathParser(flags.ArgumentParser):
  """Parses a flag that holds a path."""

  def parse(self, argument: str) -> str:
    return paths.expand(argument)


def DEFINE_path(name: str, default: str | None, help: str) -> Any:  # noqa: N802
  """Defines a flag that holds a path, which may begin with ~."""
  return flags.DEFINE(_PathParser(), name, default, help)


_CACHE = DEFINE_path(
  "compilation_cache",
  "",
  "Folder, also gs://, for compiled programs; 'off' for none. Default: "
  "$XDG_CACHE_HOME/memcomp, else ~/.cache/memcomp.",
)
# Flags defined from here on belong to the calling module.
flags.disclaim_key_flags()


def main(
  program: Callable[[], int | None],
  *,
  usage: str,
  argv: Sequence[str] | None = None,
  interrupted: int = EXIT_INTERRUPTED,
) -> NoReturn:
  """Parses the flags, runs `program` and exits with its exit code.

  Args:
    program: takes no arguments; returns an exit code or None (0).
    usage: head of the --help text.
    argv: default `sys.argv`.
    interrupted: see `guard`.
  """
  argv = list(sys.argv if argv is None else argv)
  run = functools.partial(_run, program, usage, argv)
  sys.exit(guard(run, interrupted=interrupted))


def guard(
  program: Callable[[], int | None],
  begin: str = "error: ",
  *,
  interrupted: int = EXIT_INTERRUPTED,
) -> int:
  """Runs a program; returns its exit code, or that of its error.

  Args:
    program: takes no arguments; returns an exit code or None (0).
    begin: beginning of the error line.
    interrupted: exit code after Ctrl-C or SIGTERM; `errors.EXIT_RESUMABLE` if
      the same command resumes.
  """
  streams.prepare()
  try:
    _catch_sigterm()
    code = program() or 0
    sys.stdout.flush()
    return code
  except (KeyboardInterrupt, errors.Terminated):
    goes_on = interrupted == errors.EXIT_RESUMABLE
    more = "; the same command goes on" if goes_on else ""
    print(f"\ninterrupted{more}", file=sys.stderr, flush=True)
    return interrupted
  except BrokenPipeError:
    streams.drop_output()
    return 141
  except Exception as error:
    line = errors.explain(error)
    if line is None:
      raise
    with contextlib.suppress(OSError):
      print(begin + line, file=sys.stderr, flush=True)
    try:
      sys.stdout.flush()
    except OSError:
      streams.drop_output()
    return errors.EXIT_BAD_INPUT


def _catch_sigterm() -> None:
  """Makes SIGTERM, which schedulers send, clean up like Ctrl-C."""
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, errors.terminate)


def require(name: str) -> Any:
  """Returns the value of a required flag.

  Raises:
    UserError: the flag is missing.
  """
  value = flags.FLAGS[name].value
  if value is None:
    raise errors.UserError(f"--{name} is missing; give it, or see --help")
  return value


def _allow_promotion() -> None:
  """Lets arrays meet by JAX's default rules.

  The environment may forbid that, for programs that are written for it.
  """
  os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "standard"
  os.environ["JAX_NUMPY_RANK_PROMOTION"] = "allow"
  if "jax" in sys.modules:  # It has read them.
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")


def _run(program, usage, argv) -> int | None:
  argv = _with_path(argv)
  if any(arg in ("-h", "--help", "--helpfull", "--help=true") for arg in argv):
    print(_help(usage, argv, program.__module__))
    return 0
  _quiet()
  _allow_promotion()
  _parse(argv)
  _set_compilation_cache(_CACHE.value)
  return program()


def _parse(argv: list[str]) -> None:
  """Parses `argv`; explains a failure from the config and the flags."""
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise errors.UserError(
        f"unexpected argument {rest[1]!r}; flags are written --name=value"
      )
    path = _value_of("config", argv)
    if path is not None:
      if flags.FLAGS["config"].value is None:
        raise errors.UserError(
          f"--config={path}: get_config() returned None; return the config"
        )
      # A config that failed to load raises at the first access.
      _ = flags.FLAGS["config"].value.name
  except errors.UserError:
    raise
  except Exception as error:
    raise errors.UserError(_explain(error, argv)) from error


def _explain(error: Exception, argv: list[str]) -> str:
  """Returns cause and fix of a failed parse."""
  path = _value_of("config", argv)
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


def load_config(path: str) -> Any:
  """Runs `get_config` of a config.

  Args:
    path: path of its file, or name of a config that comes with memcomp; both
      may end in `:argument`.

  Raises:
    UserError: the config does not exist, or raises; with the line number.
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
    # Bytes, whose encoding Python finds as it does for every module.
    exec(compile(file.read_bytes(), str(file), "exec"), scope)
    if "get_config" not in scope:
      raise errors.UserError(
        f"--config={path}: it has no get_config(); see configs/ for examples"
      )
    return scope["get_config"](*([argument] if argument else []))
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


def _field_problem(config: Any, arg: str, argv: list[str]) -> str | None:
  """Returns the problem with one --config.a.b=value, or None."""
  name, equals, value = arg.partition("=")
  path = name.split(".", 1)[1]
  fields = field_paths(config)
  if path not in fields:
    found = _reached(config, path)
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


def _reached(config: Any, path: str) -> Any:
  """Returns the value at a path of attributes and dict keys, or None.

  Attributes need not be fields: for example `model.mixer`, see
  `models.letters`.
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


def _value_of(name: str, argv: list[str]) -> str | None:
  index = _index_of(name, argv)
  if index < 0:
    return None
  _, equals, value = argv[index].partition("=")
  if equals:
    return value
  return argv[index + 1] if index + 1 < len(argv) else None


def _with_path(argv: list[str]) -> list[str]:
  """Returns `argv` with the path of a config that is given by its name."""
  value = _value_of("config", argv)
  if value is None:
    return argv
  index = _index_of("config", argv)
  flag, equals, _ = argv[index].partition("=")
  path = named_configs.path_of(value)
  given = [f"{flag}={path}"] if equals else [flag, path]
  return [*argv[:index], *given, *argv[index + len(given) :]]


def _help(usage: str, argv: list[str], module: str) -> str:
  """Returns usage, a module's flags and, with --config, every field."""
  shown = [usage.strip(), "", "Flags:"]
  # Where absl files the flags of a module that is run as a program.
  own = sys.argv[0] if module == "__main__" else module
  for name in (own, __name__):
    found = flags.FLAGS.get_key_flags_for_module(name)
    shown += [f"  --{f.name}: {f.help}" for f in found]
  path = _value_of("config", argv)
  if path is None:
    if "config" in flags.FLAGS:
      names = ", ".join(named_configs.names())
      shown += ["", f"Configs by name: {names}. With --config, --help lists"]
      shown[-1] += " the fields of the config."
  else:
    shown += ["", f"Fields of {path}:"]
    fields = field_paths(load_config(path))
    shown += [f"  --config.{name}={value}" for name, value in fields.items()]
  return "\n".join(shown)


@functools.cache  # Once is enough.
def _quiet() -> None:
  """Leaves out what libraries print of failures that come up as exceptions too.

  A save that fails, as on a full disk, fails in several threads of orbax and
  tensorstore, and each prints it. And what a home that cannot be written costs
  is time alone.
  """

  def wanted(record: logging.LogRecord) -> bool:
    parts = pathlib.PurePath(record.pathname).parts
    return "orbax" not in parts and "ml_collections" not in parts

  # absl's own class of logger, or records would not say who wrote them.
  absl_logging.get_absl_logger().addFilter(wanted)
  # Results of the other writes, which nobody asks for after the first error.
  logging.getLogger("asyncio").setLevel(logging.CRITICAL)
  logging.getLogger("matplotlib").setLevel(logging.ERROR)
  show = sys.unraisablehook

  def unraisable(about: "sys.UnraisableHookArgs") -> None:
    # Those writes want to hand their results to a loop that has ended.
    if str(about.exc_value) != "Event loop is closed":
      show(about)

  sys.unraisablehook = unraisable


def _set_compilation_cache(folder: str) -> None:
  if folder == "off" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
    return
  import jax

  try:
    if not folder:
      base = os.environ.get("XDG_CACHE_HOME") or paths.expand("~/.cache")
      folder = str(pathlib.Path(base) / "memcomp")
      # Nobody has asked for it to be written.
      warnings.filterwarnings("ignore", "Error .* persistent compilation cache")
    if not paths.is_remote(folder):
      pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
  except (OSError, errors.UserError):
    return  # Slower, not wrong.
  jax.config.update("jax_compilation_cache_dir", folder)
