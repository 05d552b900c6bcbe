"""Makes the standard streams of a program robust."""

import io
import os
import sys


def prepare() -> None:
  """Lets the standard streams read and print any text.

  Names and texts may contain characters that the terminal's encoding lacks, and
  the parent process may have closed a stream.
  """
  for name, mode, handler in (
    ("stdin", "r", "surrogateescape"),
    ("stdout", "w", "backslashreplace"),
    ("stderr", "w", "backslashreplace"),
  ):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    stream = getattr(sys, name)
    if isinstance(stream, io.TextIOWrapper):
      stream.reconfigure(errors=handler)


def drop_output() -> None:
  """Discards output that cannot be written (| head, a full disk).

  Otherwise the interpreter would try again at exit.
  """
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
