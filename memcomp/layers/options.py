"""The options of mixers; a config class is the only list of them.

Every field carries the checks of its value, so that each check is written once.
`Trellis(512, heads=8)` and `Trellis.from_config(config, 512)` both build the
config, so both raise the same errors.
"""

import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from memcomp_kernels import facts as facts_lib
from memcomp_kernels.math import solver
from memcomp_kernels.options import (
  check_value,
  is_a,
  not_negative,
  one_of,
  option,
)

_EXACT: dict[Any, str] = {int: "an integer", bool: "True or False"}


def taps(x: int) -> str | None:
  """Checks the width of a short convolution; 0 is none."""
  return None if x == 0 or x >= 2 else "must be 0 or at least 2"


def check_write_rate(config: Any) -> None:
  """Checks that the initial write rate is below the maximum.

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
    ValueError: naming the field, its value and the allowed values.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    wanted = _EXACT.get(field.type)
    if wanted and not is_a(value, field.type):
      raise ValueError(
        f"{field.name}={value!r} is {type(value).__name__}, not {wanted}"
      )
    try:
      check_value(field, value)
    except TypeError:
      raise ValueError(
        f"{field.name}={value!r} is {type(value).__name__}, not a number"
      ) from None


@dataclasses.dataclass(kw_only=True, slots=True)
class MixerConfig:
  """Options of all mixers; subclasses add those of their op and their own.

  If a size is 0, it follows from the layer's width by the mixer's published
  rule; see `at_width`. Subclasses are made by `config_class`.

  Attributes:
    heads: number of independent memories.
    key_dim: query and key features per head.
    value_dim: value features per head.
  """

  op: ClassVar[Any] = None
  """The `Op`. The fields of its `Spec` are options of the mixer."""
  left_out: ClassVar[tuple[str, ...]] = ()
  """Fields of `Spec` that are no options."""
  earlier: ClassVar[Mapping[str, Any]] = {}
  """Values of fields that configs of earlier versions lack."""

  heads: int = option(0, not_negative)
  key_dim: int = option(0, not_negative)
  value_dim: int = option(0, not_negative)

  if TYPE_CHECKING:  # type checkers do not see the fields from `Spec`

    def __init__(self, **options: Any): ...

  @classmethod
  def spec_fields(cls) -> list[dataclasses.Field]:
    """The fields of `Spec` that are options."""
    fields = dataclasses.fields(cls.op.Spec) if cls.op else ()
    return [field for field in fields if field.name not in cls.left_out]

  @property
  def random(self) -> bool:
    """Whether training draws random numbers (`noise` of a call)."""
    return False

  @property
  def uses_first_value(self) -> bool:
    """Whether the layer mixes its values with those of the first layer."""
    return getattr(self, "value_residual", "none") != "none"

  def spec(self) -> Any:
    """The op's `Spec`.

    Raises:
      ValueError: naming the field that is out of range.
    """
    given = {f.name: getattr(self, f.name) for f in self.spec_fields()}
    return self.op.Spec(**(given | self.derived()))

  def derived(self) -> dict[str, Any]:
    """Fields of `Spec` that follow from options, or differ from theirs."""
    return {}

  def check(self) -> None:
    """Raises ValueError if valid fields contradict each other."""

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    check_fields(self)
    self.check()
    self.spec()

  def widths(self, d_model: int) -> tuple[int, int, int]:
    """The published sizes for a width.

    Returns:
      The maximum number of heads, and the total key and value features.
    """
    return max(1, d_model // 64), d_model, d_model

  def fill(self, d_model: int) -> dict[str, Any]:
    """The sizes that the rule determines, by name; see `at_width`."""
    heads, keys, values = self.widths(d_model)
    unset = {
      name: total
      for name, total in (("key_dim", keys), ("value_dim", values))
      if not getattr(self, name)
    }
    if self.heads:
      heads = self.heads
    else:
      heads = next(
        n for n in range(heads, 0, -1) if not any(w % n for w in unset.values())
      )
    for name, total in unset.items():
      if total % heads:
        raise ValueError(
          f"heads={heads} does not divide {total} features (d_model={d_model});"
          f" give {name}, or other heads"
        )
    return {"heads": heads} | {n: w // heads for n, w in unset.items()}

  def at_width(self, d_model: int) -> Self:
    """Returns a copy with all sizes that follow from `d_model` filled in.

    Raises:
      ValueError: `heads` does not divide the features.
    """
    filled = dataclasses.replace(self, **self.fill(d_model))
    filled.validate()
    return filled

  def letters(self, length: int) -> dict[str, float]:
    """The letters of the op's formulas (`facts.LETTERS`) at `length` tokens."""
    return {
      "H": self.heads,
      "G": getattr(self, "kv_heads", 0) or self.heads,
      "d_k": self.key_dim,
      "d_v": self.value_dim,
      "n": length,
      **self.op.facts(self.spec()).letters(length),
    }

  def state_floats(self, length: int) -> int:
    """Floats of the memory after `length` tokens of a sequence, per layer.

    Counts what reads need between two chunks. Within a chunk, some states also
    hold a copy from its start.
    """
    return self._cost("floats", length)

  def memory_flops(self, length: int) -> int:
    """Forward flops of the memory per token and layer.

    The mean over a sequence of `length` tokens; a multiply-add counts as two.
    """
    return self._cost("flops", length)

  def _cost(self, name: str, length: int) -> int:
    formula = getattr(self.op.facts(self.spec()), name)
    return facts_lib.cost(formula, self.letters(length))


def config_class[T: MixerConfig](cls: type[T]) -> type[T]:
  """Makes a subclass of `MixerConfig` a dataclass with the fields of its Spec.

  Types and defaults are the Spec's. A field that the class declares itself
  replaces the Spec's, for another default, type or check. A field of a base
  class is not replaced; if the class only gives it another default, the checks
  of its value stay.
  """
  inherited = {field.name: field for field in dataclasses.fields(cls)}
  own = inspect.get_annotations(cls)
  for name in own.keys() & inherited.keys():
    default = cls.__dict__[name]
    if not isinstance(default, dataclasses.Field):
      checks = inherited[name].metadata.get("checks", ())
      setattr(cls, name, option(default, *checks))
  annotations = {}
  for field in cls.spec_fields():
    if field.name not in inherited:
      annotations[field.name] = field.type
      if field.name not in own:
        setattr(cls, field.name, field.default)
  cls.__annotations__ = annotations | own
  return dataclasses.dataclass(kw_only=True, slots=True)(cls)


SOLVERS = ("auto", *solver.METHODS)


@dataclasses.dataclass(kw_only=True, slots=True)
class SolverConfig:
  """How per-token gradients are solved: affects speed, not results.

  Attributes:
    method: "substitution" is exact. "sweeps" iterates to convergence, else
      substitutes; it adds `sweeps`, `residual` and `unreached` to the training
      metrics. "auto" is the platform's fastest exact method.
    tile_time: tokens that are solved together; 0 is the default.
    tolerance: convergence tolerance of sweeps, in float32.
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

  def has_stats(self, gradient_at: str) -> bool:
    """Whether calls produce solver statistics."""
    return self.method == "sweeps" and gradient_at == "token"


def values(config: MixerConfig) -> dict[str, Any]:
  """The fields of a config by name."""
  return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def configure(
  layer: str, config: type[MixerConfig], d_model: int, given: dict[str, Any]
) -> MixerConfig:
  """The config for the keywords of a layer's constructor.

  Raises:
    TypeError: the layer has no such option.
    ValueError: an option is out of range. Both errors are one line that names
      the layer and the field.
  """
  known = [field.name for field in dataclasses.fields(config)]
  for name in given:
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      hint = f"did you mean {near[0]}?" if near else f"has: {', '.join(known)}"
      raise TypeError(f"{layer} has no option {name!r}; {hint}")
  try:
    if not is_a(d_model, int) or d_model < 1:
      raise ValueError(f"d_model={d_model!r} must be a width, at least 1")
    made = config(**given)
    made.validate()
    return made.at_width(d_model)
  except ValueError as error:
    raise ValueError(f"{layer}: {error}") from None


def meanings(config: type[MixerConfig]) -> dict[str, str]:
  """What each option means: docstrings of a config, its bases and its Spec."""
  found: dict[str, str] = {}
  for base in (*config.__mro__, config.op and config.op.Spec):
    text = inspect.cleandoc(base.__doc__ or "")
    _, _, listed = text.partition("\nAttributes:\n")
    for name, words in re.findall(
      r"^  (\w+): (.*?)(?=^  \w+: |^\S|\Z)", listed, re.DOTALL | re.MULTILINE
    ):
      found.setdefault(name, " ".join(words.split()))
  return found


def documentation(about: str, config: type[MixerConfig]) -> str:
  """A layer's docstring with all its options, for `help`."""
  about_of = meanings(config)
  lines = [inspect.cleandoc(about), "", "Options:"]
  lines += (
    textwrap.fill(
      f"{field.name}: {about_of.get(field.name, '')}".rstrip(": "),
      width=78,
      initial_indent="  ",
      subsequent_indent="    ",
    )
    for field in dataclasses.fields(config)
  )
  return "\n".join(lines)


def signature(function: Callable, config: type) -> inspect.Signature:
  """A constructor's signature that lists all options, for `help`."""
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
