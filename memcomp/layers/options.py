"""The options of mixers: a config class is the one list of their fields.

A field says what its value may be, so that a check which many mixers need
stands once. `Trellis(512, heads=8)` and `Trellis.from_config(config, 512)` both
make the config, so both give the same errors.
"""

import abc
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

from memcomp_kernels.math import solver

Check = Callable[[Any], str | None]
"""Says in a few words what is wrong with a value, or None."""


def option(default: Any, *checks: Check) -> Any:
  """A field of a config with its default and the checks of its value."""
  return dataclasses.field(default=default, metadata={"checks": checks})


def one_of(choices: Iterable[str]) -> Check:
  """One of some words."""
  listed = ", ".join(choices)
  return lambda x: None if x in choices else f"is not one of: {listed}"


def at_least(low: float) -> Check:
  """A number from `low` on."""
  return lambda x: None if x >= low else f"must be at least {low}"


def not_negative(x: float) -> str | None:
  """Zero or more."""
  return None if x >= 0 else "must not be negative"


def positive(x: float) -> str | None:
  """More than zero."""
  return None if x > 0 else "must be positive"


def inside(low: float, high: float) -> Check:
  """A number between two others, without them."""
  return lambda x: None if low < x < high else f"must be in ({low:g}, {high:g})"


def taps(x: int) -> str | None:
  """The width of a short convolution, or 0 for none."""
  return None if x == 0 or x >= 2 else "must be 0 or at least 2"


def check_write_rate(config: Any) -> None:
  """Checks that a write rate starts between 0 and the largest one.

  Raises:
    ValueError: naming `write_rate_init` and `write_rate_scale`.
  """
  if not 0 < config.write_rate_init < config.write_rate_scale:
    raise ValueError(
      f"write_rate_init={config.write_rate_init} must be in (0,"
      f" write_rate_scale={config.write_rate_scale})"
    )


def check_fields(config: Any) -> None:
  """Runs the checks of a config's fields.

  Raises:
    ValueError: naming the field, its value and what it may be.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    for check in field.metadata.get("checks", ()):
      try:
        reason = check(value)
      except TypeError:
        reason = f"is {type(value).__name__}, not a number"
      if reason:
        raise ValueError(f"{field.name}={value!r} {reason}")


@dataclasses.dataclass(kw_only=True, slots=True)
class MixerConfig(abc.ABC):
  """Options that all mixers have; each adds its own.

  Sizes of 0 follow from the width of the layer by the mixer's published rule,
  see `at_width`.

  Attributes:
    heads: memories side by side.
    key_dim: features of a head's query and key.
    value_dim: features of a head's value.
  """

  Spec: ClassVar[Any]
  """The memory's meaning, whose fields a config has too."""

  heads: int = option(0, not_negative)
  key_dim: int = option(0, not_negative)
  value_dim: int = option(0, not_negative)

  @property
  def random(self) -> bool:
    """Whether training it draws random numbers (`noise` of a call)."""
    return False

  @property
  def uses_first_value(self) -> bool:
    """Whether its values are mixed with those of the model's first layer."""
    return getattr(self, "value_residual", "none") != "none"

  def spec(self) -> Any:
    """The meaning of the memory, see the kernel's `Spec`.

    Raises:
      ValueError: naming the field that is out of range.
    """
    names = [field.name for field in dataclasses.fields(self.Spec)]
    return self.Spec(**{name: getattr(self, name) for name in names})

  def check(self) -> None:  # noqa: B027 (most mixers have nothing to check)
    """Raises ValueError where fields, each in its range, do not agree."""

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    check_fields(self)
    self.check()
    self.spec()

  def widths(self, d_model: int) -> tuple[int, int, int]:
    """The published sizes at a width.

    Returns:
      The most heads, and the features of all keys and of all values together.
    """
    return max(1, d_model // 64), d_model, d_model

  def fill(self, d_model: int) -> dict[str, Any]:
    """The sizes that are left to the rule, by name; see `at_width`."""
    heads, keys, values = self.widths(d_model)
    open_ = {
      name: whole
      for name, whole in (("key_dim", keys), ("value_dim", values))
      if not getattr(self, name)
    }
    if self.heads:
      heads = self.heads
    else:
      heads = next(
        n for n in range(heads, 0, -1) if not any(w % n for w in open_.values())
      )
    for name, whole in open_.items():
      if whole % heads:
        raise ValueError(
          f"heads={heads} does not divide {whole} features (d_model={d_model});"
          f" give {name}, or other heads"
        )
    return {"heads": heads} | {n: w // heads for n, w in open_.items()}

  def at_width(self, d_model: int) -> Self:
    """The same config with the sizes that follow from `d_model` filled in.

    Raises:
      ValueError: `heads` does not divide the features.
    """
    filled = dataclasses.replace(self, **self.fill(d_model))
    filled.validate()
    return filled

  @abc.abstractmethod
  def state_floats(self, length: int) -> int:
    """Floats of the memory after `length` tokens of a sequence, one layer.

    What reads need between two chunks: inside of one, some states also hold a
    copy of its start.
    """

  @abc.abstractmethod
  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token, one layer.

    The mean over a sequence of `length` tokens; multiply-adds count two.
    """


SOLVERS = ("auto", *solver.METHODS)


@dataclasses.dataclass(kw_only=True, slots=True)
class SolverConfig:
  """How gradients per token are evaluated: speed, never meaning.

  Attributes:
    method: "substitution", exact by construction; "sweeps", until nothing
      moves, else substitution: then `sweeps`, `residual` and `unreached` join
      the training metrics; "auto" is the fastest exact one of the platform.
    tile_time: tokens that are solved together; 0 is the default.
    tolerance: of sweeps, in float32.
  """

  method: str = option("auto", one_of(SOLVERS))
  tile_time: int = option(0, not_negative)
  tolerance: float = option(1e-6, not_negative)

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    try:
      check_fields(self)
    except ValueError as error:
      raise ValueError(f"solver.{error}") from None

  def stats(self, gradient_at: str) -> bool:
    """Whether there is something to tell of each call."""
    return self.method == "sweeps" and gradient_at == "token"


def values(config: MixerConfig) -> dict[str, Any]:
  """The fields of a config by name."""
  return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def configure(
  layer: str, config: type[MixerConfig], d_model: int, given: dict[str, Any]
) -> MixerConfig:
  """The config that the keywords of a layer's constructor ask for.

  Raises:
    TypeError: the layer has no such option.
    ValueError: an option is out of range. Both are one line that names the
      layer and the field.
  """
  known = [field.name for field in dataclasses.fields(config)]
  for name in given:
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      hint = f"did you mean {near[0]}?" if near else f"has: {', '.join(known)}"
      raise TypeError(f"{layer} has no option {name!r}; {hint}")
  try:
    if isinstance(d_model, bool) or not isinstance(d_model, int) or d_model < 1:
      raise ValueError(f"d_model={d_model!r} must be a width, at least 1")
    made = config(**given)
    made.validate()
    return made.at_width(d_model)
  except ValueError as error:
    raise ValueError(f"{layer}: {error}") from None


def signature(function: Callable, config: type) -> inspect.Signature:
  """A constructor's signature with its options spelled out, for `help`."""
  own = inspect.signature(function)
  shown = [
    p
    for p in own.parameters.values()
    if p.kind is not p.VAR_KEYWORD and p.name != "self"
  ]
  for field in dataclasses.fields(config):
    default = field.default
    if default is dataclasses.MISSING and callable(field.default_factory):
      default = field.default_factory()
    shown.append(
      inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=field.type,
      )
    )
  return own.replace(parameters=shown)
