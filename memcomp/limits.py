"""Checks the ranges of numbers from outside."""

import functools
import numbers
from collections.abc import Iterable
from typing import Any

from memcomp import errors

COUNT = 2**31 - 1
"""Maximum of any count, because devices count in int32."""

A_SEED = "a whole number in [0, 2**32)"
"""Describes the range of `is_seed`."""

SIDE_BY_SIDE = 2**20
"""Maximum number of rows, samples or runs in one list."""

CONTEXT = 2**27
"""Maximum generated text in tokens, which is held in memory."""

SECONDS = 10**9
"""Maximum waiting time; the system's clocks allow about ten times that."""


def check(name: str, value: float, least: int = 1, most: int = COUNT) -> None:
  """Checks that a number is whole and in a range.

  Args:
    name: name as the user writes it, such as --limit.
    value: the given number.
    least: minimum.
    most: maximum.

  Raises:
    UserError: it is outside of [least, most], or no whole number.
  """
  if not value >= least:
    raise errors.UserError(f"{name}={value}: give {least} or more")
  if value > most:
    raise errors.UserError(f"{name}={value}: give {most} or less")
  if not isinstance(value, numbers.Integral):
    raise errors.UserError(f"{name}={value}: give a whole number")


class NotFiniteError(errors.UserError):
  """A model has computed nan or infinity."""


def check_computed(x: Any) -> None:
  """Raises NotFiniteError if a model has computed what is not finite."""
  if not _all_finite()(x):
    raise NotFiniteError(
      "the model computes numbers that are not finite: its training diverged,"
      " its weights are damaged, or the text is too long for it; use another"
      " checkpoint"
    )


@functools.cache
def _all_finite() -> Any:
  import jax  # late, because flags are checked without it

  def all_finite(x):
    return jax.numpy.isfinite(x).all()

  return jax.jit(all_finite)


def is_seed(value: Any) -> bool:
  """Whether numpy's legacy generators accept the seed."""
  return 0 <= value < 2**32


def check_seed(name: str, value: int) -> None:
  """Raises UserError if a seed is out of range."""
  if not is_seed(value):
    raise errors.UserError(f"{name}={value}: give {A_SEED}")


def whole_numbers(
  name: str, given: Iterable[int | str], least: int = 1, most: int = COUNT
) -> list[int]:
  """Parses a list of whole numbers, such as a flag's.

  Raises:
    UserError: one is not a whole number, or outside of [least, most].
  """
  found = []
  for one in given:
    text = str(one)
    # Python refuses to parse very long numbers by default.
    if not text.isdecimal() or len(text) > 20:
      raise errors.UserError(
        f"{name}={','.join(map(str, given))[:80]}: give whole numbers,"
        f" {least} or more"
      )
    check(name, int(text), least, most)
    found.append(int(text))
  return found
