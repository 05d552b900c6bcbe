"""Ranges of the whole numbers that come from outside, and their one check."""

from collections.abc import Iterable
from typing import Any

from memcomp import errors

COUNT = 2**31 - 1
"""The most of anything: devices count in int32."""

A_SEED = "a whole number in [0, 2**32)"
"""What `is_seed` asks for."""

SIDE_BY_SIDE = 2**20
"""The most rows, samples or runs that one list holds."""

CONTEXT = 2**27
"""The longest text, in tokens, that is made up to be read: it is held whole."""

SECONDS = 10**9
"""The longest time to wait: the system's clocks take some ten times that."""


def check(name: str, value: float, least: int = 1, most: int = COUNT) -> None:
  """Checks a number.

  Args:
    name: how the user writes it, as --limit.
    value: what was given.
    least: the smallest number allowed.
    most: the largest one.

  Raises:
    UserError: it is outside of [least, most].
  """
  if not value >= least:
    raise errors.UserError(f"{name}={value}: give {least} or more")
  if value > most:
    raise errors.UserError(f"{name}={value}: give {most} or less")


def is_seed(value: Any) -> bool:
  """Whether numpy's frozen generators take it; all seeds are such."""
  return 0 <= value < 2**32


def check_seed(name: str, value: int) -> None:
  """Checks a seed; raises UserError."""
  if not is_seed(value):
    raise errors.UserError(f"{name}={value}: give {A_SEED}")


def whole_numbers(
  name: str, given: Iterable[int | str], least: int = 1, most: int = COUNT
) -> list[int]:
  """Reads a list of numbers, such as a flag's.

  Raises:
    UserError: one is no whole number, or outside of [least, most].
  """
  found = []
  for one in given:
    text = str(one)
    # Longer ones Python reads only if asked to.
    if not text.isdecimal() or len(text) > 20:
      raise errors.UserError(
        f"{name}={','.join(map(str, given))[:80]}: give whole numbers,"
        f" {least} or more"
      )
    check(name, int(text), least, most)
    found.append(int(text))
  return found
