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
import functools
import logging
import os
import pathlib
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import flags
from absl import logging as absl_logging

from memcomp import config_flag, errors, named_configs, paths, streams

load_config = config_flag.load_config

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
  prefix: str = "error: ",
  *,
  interrupted: int = EXIT_INTERRUPTED,
) -> int:
  """Runs a program; returns its exit code, or that of its error.

  Args:
    program: takes no arguments; returns an exit code or None (0).
    prefix: beginning of the error line.
    interrupted: exit code after Ctrl-C or SIGTERM; `errors.EXIT_RESUMABLE` if
      the same command resumes.
  """
  streams.prepare()
  _repeat_lost_signals()
  try:
    catch_sigterm()
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
      print(prefix + line, file=sys.stderr, flush=True)
    try:
      sys.stdout.flush()
    except OSError:
      streams.drop_output()
    return errors.EXIT_BAD_INPUT


def catch_sigterm() -> None:
  """Makes SIGTERM, which schedulers send, clean up like Ctrl-C."""
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, errors.terminate)


@functools.cache  # Once is enough.
def _repeat_lost_signals() -> None:
  """Sends a signal again whose exception Python has dropped.

  It drops those of `__del__` and of callbacks of weak references, and a signal
  may come while one runs, most often while modules are imported.
  """
  show = sys.unraisablehook
  numbers: dict[Any, int] = {
    KeyboardInterrupt: signal.SIGINT,
    errors.Terminated: signal.SIGTERM,
  }
  # Names of this module are gone when Python ends.
  is_ending, later = sys.is_finalizing, threading.Timer
  kill, process = os.kill, os.getpid

  def unraisable(about: "sys.UnraisableHookArgs") -> None:
    number = None if is_ending() else numbers.get(about.exc_type)
    if number is None:
      show(about)
      return
    # Raised here, it would be dropped again.
    again = later(0.05, kill, (process(), number))
    again.daemon = True
    again.start()

  sys.unraisablehook = unraisable


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
  """Uses JAX's default promotion rules.

  The environment may select stricter rules, for programs that support them.
  """
  os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "standard"
  os.environ["JAX_NUMPY_RANK_PROMOTION"] = "allow"
  if "jax" in sys.modules:  # it has already read the environment
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")


def _run(program, usage, argv) -> int | None:
  try:
    pathlib.Path.cwd()
  except FileNotFoundError as error:
    raise errors.UserError(
      "the current folder was removed; change into one that exists"
    ) from error
  argv = config_flag.with_path(argv)
  if any(arg in ("-h", "--help", "--helpfull", "--help=true") for arg in argv):
    print(_help(usage, argv, program.__module__))
    return 0
  silence_libraries()
  _allow_promotion()
  _parse(argv)
  set_compilation_cache(_CACHE.value)
  return program()


def _parse(argv: list[str]) -> None:
  """Parses `argv`; explains a failure from the config and the flags."""
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise errors.UserError(
        f"unexpected argument {rest[1]!r}; flags are written --name=value"
      )
    path = config_flag.value_of("config", argv)
    if path is not None:
      from memcomp import config as config_lib

      # What failed to load is no config, either; `explain` loads it again.
      if not isinstance(flags.FLAGS["config"].value, config_lib.Config):
        raise TypeError(path)
  except errors.UserError:
    raise
  except Exception as error:
    raise errors.UserError(config_flag.explain(error, argv)) from error


def _help(usage: str, argv: list[str], module: str) -> str:
  """Returns usage, a module's flags and, with --config, every field."""
  shown = [usage.strip(), "", "Flags:"]
  # Where absl files the flags of a module that is run as a program.
  own = sys.argv[0] if module == "__main__" else module
  for name in (own, __name__):
    found = flags.FLAGS.get_key_flags_for_module(name)
    shown += [f"  --{f.name}: {f.help}" for f in found]
  path = config_flag.value_of("config", argv)
  if path is None:
    if "config" in flags.FLAGS:
      names = ", ".join(named_configs.names())
      shown += ["", f"Configs by name: {names}. With --config, --help lists"]
      shown[-1] += " the fields of the config."
  else:
    shown += ["", f"Fields of {path}:"]
    fields = config_flag.field_paths(config_flag.load_config(path))
    shown += [f"  --config.{name}={value}" for name, value in fields.items()]
  return "\n".join(shown)


@functools.cache  # Once is enough.
def silence_libraries() -> None:
  """Hides what libraries print about failures that also raise exceptions.

  A save that fails, as on a full disk, fails in several threads of orbax and
  tensorstore, and each prints it. ml_collections warns if the home folder
  cannot be written, which only costs time.
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


def set_compilation_cache(folder: str) -> None:
  """Sets JAX's cache of compiled programs.

  Args:
    folder: folder of the cache; "" is in the user's cache folder, "off" is
      none. The variable JAX_COMPILATION_CACHE_DIR takes precedence.

  Raises:
    OSError: the given folder cannot be made.
  """
  if folder == "off" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
    return
  import jax

  given = bool(folder)
  try:
    if not given:
      base = os.environ.get("XDG_CACHE_HOME") or paths.expand("~/.cache")
      folder = str(pathlib.Path(base) / "memcomp")
      # Nobody has asked for it to be written.
      warnings.filterwarnings("ignore", "Error .* persistent compilation cache")
    if not paths.is_remote(folder):
      pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
  except (OSError, errors.UserError):
    if given:
      raise
    return  # Slower, not wrong.
  jax.config.update("jax_compilation_cache_dir", folder)
