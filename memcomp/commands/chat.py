"""Talks with a trained model in the terminal.

  memcomp chat --checkpoint=runs/quickstart
  memcomp chat --checkpoint=runs/quickstart --prompt_file=book.txt

The model reads each line and continues. /help lists the other commands, such as
saving the session and continuing it another day. This is the task chat of
`memcomp eval`. Exit codes: 0 done, 2 the input needs a fix.
"""

from typing import NoReturn

from absl import flags

from memcomp import cli, errors
from memcomp.commands import evaluate

flags.declare_key_flag("checkpoint")
flags.declare_key_flag("step")
flags.declare_key_flag("prompt")
flags.declare_key_flag("prompt_file")
flags.declare_key_flag("tokens")
flags.declare_key_flag("stop")
flags.declare_key_flag("temperature")
flags.declare_key_flag("top_k")
flags.declare_key_flag("top_p")
flags.declare_key_flag("min_p")
flags.declare_key_flag("repetition_penalty")
flags.declare_key_flag("seed")
flags.declare_key_flag("rotary_scale")
flags.declare_key_flag("tensor")


def main() -> NoReturn:
  """Runs the command line; exits."""
  cli.main(program, usage=__doc__)


def program() -> None:
  """Starts the conversation that the flags describe."""
  if flags.FLAGS["task"].present:
    raise errors.UserError("--task: chat has one; use memcomp eval for others")
  evaluate.run_task("chat")


if __name__ == "__main__":
  main()
