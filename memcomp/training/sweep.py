"""Runs a config file many times, each in a separate process, one by one.

The same sweep again resumes: it skips trained and evaluated runs of the same
config, and interrupted runs continue from their checkpoints.
"""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memcomp import config as config_lib
from memcomp import errors
from memcomp.runs import workdir as workdir_lib
from memcomp.training import signals

_OWN = ("config", "each", "seeds", "workdir")
"""Flags that the sweep sets itself for every run."""

_STOPPED = (errors.EXIT_RESUMABLE, *(128 + s for s in signals.NAMES))
"""Exit codes of a run that the user has stopped."""

_LATER_SECONDS = 10.0
"""Time for a run to end by the Ctrl-C that a terminal has sent it."""


def run(
  program: Sequence[str],
  flags: Sequence[str],
  *,
  config: str,
  names: Sequence[str],
  seeds: int,
  workdir: pathlib.Path,
  config_of: Callable[[Sequence[str]], config_lib.Config],
) -> int:
  """Runs a program for each name and seed.

  Args:
    program: the command that starts it, without flags.
    flags: flags of this process; except for the sweep's own, all runs get them.
    config: path of the config file.
    names: arguments of its `get_config`.
    seeds: each name is run with seeds 0 .. seeds-1.
    workdir: the runs are in `<workdir>/<name>-<seed>`.
    config_of: returns the config that the flags of a run describe. A run that
      was evaluated at its last step is finished.

  Returns:
    0, or the exit code of the first failed run (128 + N for a run that signal N
    ended). The sweep stops if the user stops a run or its input needs a fix. It
    continues if a run diverges, crashes or is killed.

  Raises:
    UserError: the flags also set a seed; or a finished run has another config.
  """
  shared = _without(flags, _OWN)
  given = [a.lstrip("-") for a in shared if a.startswith("-")]
  if any(name.startswith("config.seed") for name in given):
    raise errors.UserError("--config.seed: with --each seeds come by --seeds")
  if any(name.startswith("flagfile") for name in given):
    raise errors.UserError(
      "--flagfile: beside --each give its flags themselves"
    )
  runs = {
    workdir / f"{name}-{seed}": [
      f"--config={config}:{name}",
      f"--config.seed={seed}",
      f"--workdir={workdir / f'{name}-{seed}'}",
      *shared,
    ]
    for seed in range(seeds)
    for name in names
  }
  finished = []
  for folder, given in runs.items():
    if evaluated := _evaluated(folder):
      wanted = config_of(given)
      if evaluated >= wanted.training.steps:
        workdir_lib.check(folder, wanted)
        finished.append(folder)
  failed: dict[str, int] = {}
  by_signal: set[str] = set()
  for number, (folder, given) in enumerate(runs.items(), 1):
    print(f"\n[{number}/{len(runs)}] {folder}", end="", flush=True)
    if folder in finished:
      print(": done before", flush=True)
      continue
    print(flush=True)
    code, asked = _call([*program, *given])
    if code < 0:
      by_signal.add(folder.name)
      code = 128 - code
    if asked and not code:  # it ended before it heard
      code = 128 + asked
    stopped = asked or code in _STOPPED
    if stopped:
      with contextlib.suppress(OSError):  # of a terminal that is gone
        print("stopped; the same command goes on", file=sys.stderr, flush=True)
    if stopped or code == errors.EXIT_BAD_INPUT:
      _tell(failed, by_signal)
      return code
    if code:
      failed[folder.name] = code
  _tell(failed, by_signal)
  return next(iter(failed.values()), 0)


def _tell(failed: dict[str, int], by_signal: set[str]) -> None:
  for name, code in failed.items():
    signal_of = f" (signal {code - 128})" if name in by_signal else ""
    print(f"{name} ended with exit code {code}{signal_of}", file=sys.stderr)


def started_by() -> list[str]:
  """Returns the command that started this process, without its flags.

  It is `python train.py`, `python -m memcomp train` or the script `memcomp`
  with `train`, each with the options of the interpreter.
  """
  end = len(sys.orig_argv) - len(sys.argv[1:])
  return [sys.executable, *sys.orig_argv[1:end]]


def choose(names: str, file: Mapping[str, Any], path: str) -> list[str]:
  """Parses the names in `--each`.

  Args:
    names: comma-separated, or "all": the file's `NAMES`.
    file: namespace of the config file. Its `get_config` may accept more names
      than `NAMES` lists.
    path: path of the config file, for messages.

  Raises:
    UserError: the file has no names, or does not accept one of these.
  """
  known = file.get("NAMES")
  if names == "all":
    if known is None:
      raise errors.UserError(
        f"--each=all: {path} lists no NAMES; see configs/compare.py"
      )
    return list(known)
  chosen = [name for name in names.split(",") if name]
  if not chosen:
    raise errors.UserError("--each is empty; give names, or all")
  for name in chosen:
    if name in (known or ()):
      continue
    try:
      file["get_config"](name)
    except errors.UserError:
      raise
    except Exception as error:  # the file's own, whatever it raises
      kind = (
        ""
        if isinstance(error, (ValueError, TypeError))
        else f"{type(error).__name__}: "
      )
      raise errors.UserError(
        f"--each: {path} does not take {name!r}: {kind}{error}"
      ) from error
  return chosen


def _evaluated(folder: pathlib.Path) -> int:
  """The step at which a run was evaluated, 0 if it was not."""
  try:
    result = json.loads((folder / "eval" / "results.json").read_text())
    return int(result["step"])
  except (FileNotFoundError, *errors.BAD_JSON, KeyError, TypeError):
    return 0


def _call(command: list[str]) -> tuple[int, int]:
  """Runs a command to its end, and passes signals on to it.

  Returns:
    Its exit code, and the signal that asked to stop, or 0.
  """
  asked = 0

  def pass_on(number: int, _) -> None:
    nonlocal asked
    asked = number
    if number != signal.SIGINT:
      child.send_signal(number)
      return
    # A terminal sends Ctrl-C to both processes, `kill` to this one alone. A
    # second one would abort the run, so the child is asked by SIGTERM, if it
    # has not ended by then.
    timer = threading.Timer(_LATER_SECONDS, child.terminate)
    timer.daemon = True
    timer.start()

  child = subprocess.Popen(command)
  # The child would inherit SIG_IGN, so use a handler. But what was started with
  # `nohup` is to outlive its terminal.
  before = {
    number: signal.signal(number, pass_on) for number in signals.caught()
  }
  try:
    code = child.wait()
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  return code, asked


def _without(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
  """Returns the arguments without these flags and their values."""
  kept, skip = [], False
  for argument in arguments:
    if skip:
      skip = False
      continue
    name, equals, _ = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name in names:
      skip = not equals
    else:
      kept.append(argument)
  return kept
