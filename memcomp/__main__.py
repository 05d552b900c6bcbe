"""The program memcomp: one command for each task.

  memcomp train --config=quickstart
  memcomp eval --checkpoint=runs/quickstart --task=perplexity
  python -m memcomp train --config=quickstart

Exit codes are those of the commands; 2 also for an unknown command.
"""

import difflib
import importlib
import sys
from typing import NamedTuple

import memcomp
from memcomp import errors, streams


class Command(NamedTuple):
  """A command.

  Attributes:
    module: module whose `main()` runs it.
    summary: description for --help.
  """

  module: str
  summary: str


COMMANDS = {
  "train": Command(
    "memcomp.commands.train", "train the experiment of a config, or resume it"
  ),
  "eval": Command(
    "memcomp.commands.evaluate", "evaluate a trained model, or sample from it"
  ),
  "chat": Command(
    "memcomp.commands.chat", "talk with a trained model in the terminal"
  ),
  "prepare": Command(
    "memcomp.data.prepare", "tokenize a large corpus once, into shards"
  ),
  "export": Command(
    "memcomp.export.__main__", "write a trained model as safetensors"
  ),
  "convert": Command(
    "memcomp.convert.__main__",
    "replace a trained model's attention by a memory",
  ),
  "doctor": Command(
    "memcomp.doctor", "check this machine and report what will be used"
  ),
}


def main() -> int:
  """Runs the command that `sys.argv` names; returns an exit code."""
  streams.prepare()
  name, *flags = sys.argv[1:] or [""]
  if name in ("-h", "--help"):
    print(_help())
    return 0
  if name == "--version":
    print(f"memcomp {memcomp.__version__}")
    return 0
  if name not in COMMANDS:
    print(f"error: {_unknown(name)}", file=sys.stderr)
    return errors.EXIT_BAD_INPUT
  # Libraries that read flags look at sys.argv.
  sys.argv = [f"memcomp {name}", *flags]
  return importlib.import_module(COMMANDS[name].module).main()


def _help() -> str:
  lines = [
    "memcomp COMMAND [flags]: compressive-memory sequence layers for JAX",
    "",
    *(f"  {name:<9}{command.summary}" for name, command in COMMANDS.items()),
    "",
    "memcomp COMMAND --help says more. memcomp --version: the version.",
  ]
  return "\n".join(lines)


def _unknown(name: str) -> str:
  if not name:
    return "no command is given; memcomp --help lists them"
  near = difflib.get_close_matches(name, COMMANDS, n=1)
  hint = f"did you mean {near[0]}?" if near else "memcomp --help lists them"
  return f"{name}: there is no such command; {hint}"


if __name__ == "__main__":
  sys.exit(main())
