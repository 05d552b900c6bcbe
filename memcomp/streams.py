"""The standard streams of a program, whatever they are connected to."""

import io
import os
import sys


def prepare() -> None:
  """Lets the standard streams take whatever is read and printed.

  Names and texts may hold what the encoding of a terminal has not, and who
  started the program may have closed them.
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
  """Lets go of output that cannot be written (| head, a full disk).

  The interpreter would try once more on its way out.
  """
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
