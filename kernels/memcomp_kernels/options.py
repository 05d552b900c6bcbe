"""Options: frozen dataclasses whose fields carry the checks of their values.

  @options
  class Spec:
    num_slots: int = option(64, at_least(1))
    scale: float | None = option(None, positive)

Every `Spec` and every `Tiling` is such a dataclass. The range of a field is
written once, next to it.
"""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

REQUIRED = dataclasses.MISSING
"""Pass this to `option` for a field that must be given."""

Check = Callable[[Any], str | None]
"""Returns what is wrong with a value in a few words, or None."""

_NUMBERS = {int: numbers.Integral, float: numbers.Real}


def option(default: Any, *checks: Check) -> Any:
  """A field with a default and checks of its value."""
  return dataclasses.field(default=default, metadata={"checks": checks})


def one_of(choices: Collection[str]) -> Check:
  """Checks that a word is one of `choices`."""
  listed = ", ".join(choices)
  return lambda x: None if x in choices else f"is not one of: {listed}"


def at_least(low: float) -> Check:
  """Checks that a number is at least `low`."""
  return lambda x: None if x >= low else f"must be at least {low}"


def at_most(high: float) -> Check:
  """Checks that a number is at most `high`."""
  return lambda x: None if x <= high else f"must be at most {high}"


def inside(low: float, high: float) -> Check:
  """Checks that a number lies strictly between `low` and `high`."""
  return lambda x: None if low < x < high else f"must be in ({low:g}, {high:g})"


def not_negative(x: float) -> str | None:
  """Checks that a number is zero or more."""
  return None if x >= 0 else "must not be negative"


def positive(x: float) -> str | None:
  """Checks that a number is more than zero."""
  return None if x > 0 else "must be positive"


def kind(x: Any) -> str:
  """Returns the name of x's type.

  `Inputs`, `Spec` and `State` get the name of their module, too, because every
  memory has them.
  """
  name = type(x).__name__
  if name in ("Inputs", "Spec", "State"):
    return f"{type(x).__module__}.{name}"
  return name


def is_a(x: Any, expected: Any) -> bool:
  """Whether x is of a type; a number of NumPy is a number, a bool is none."""
  if not isinstance(expected, type):
    return True  # such as a function, whose type says little
  if isinstance(x, bool) and expected in _NUMBERS:
    return False
  return isinstance(x, _NUMBERS.get(expected, expected))


def check_finite(name: str, x: Any) -> None:
  """Raises ValueError if x is a number that is nan or infinite."""
  real = isinstance(x, numbers.Real) and not isinstance(x, numbers.Integral)
  if real and not math.isfinite(x):
    raise ValueError(f"{name}={x} must be finite")


def check_value(field: dataclasses.Field, x: Any) -> None:
  """Raises ValueError if x is not finite, or outside the range of a field."""
  check_finite(field.name, x)
  optional = types.NoneType in typing.get_args(field.type)
  if optional and x is None:
    return
  for check in field.metadata.get("checks", ()):
    reason = check(x)
    if reason:
      none = ", or None" if optional else ""
      raise ValueError(f"{field.name}={x!r} {reason}{none}")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: Any) -> Any:
  """Makes a frozen dataclass whose fields have their types and ranges.

  Fields are keywords. The class's own `__post_init__` runs afterwards and
  checks what concerns several fields.
  """
  check_together = cls.__dict__.get("__post_init__", lambda _: None)

  def check(self):
    for field in dataclasses.fields(self):
      x, declared = getattr(self, field.name), field.type
      union = isinstance(declared, types.UnionType)
      allowed = typing.get_args(declared) if union else (declared,)
      if not any(is_a(x, t) for t in allowed):
        words = " or ".join(getattr(t, "__name__", str(t)) for t in allowed)
        raise TypeError(
          f"{field.name}={x!r} is of type {kind(x)}, expected"
          f" {words.replace('NoneType', 'None')}"
        )
      check_value(field, x)
    check_together(self)

  cls.__post_init__ = check
  return dataclasses.dataclass(frozen=True, kw_only=True)(cls)
