"""Shapes as words: what the annotations of `Inputs` and `State` say.

  query: Annotated[jax.Array, "batch time heads key_dim"]
  skip: Annotated[jax.Array | None, "batch time heads 1", If("skip")]
  position: Annotated[jax.Array, "batch", "int32"]

An axis is

  a word        the Spec's number by that name, or else one size in all arrays
  a number      that many
  "1|2"         one of these numbers
  "heads/parts" the quotient of two words, without a remainder

Arrays are floating unless a dtype follows the words. `If` says which Specs
have the array. From these words the ops make checks, states of zeros, errors
and signatures.
"""

import dataclasses
import functools
import types as python_types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

Sizes = dict[str, int]
"""Word -> size."""


@dataclasses.dataclass(frozen=True)
class If:
  """Says which Specs have an array.

  Attributes:
    attribute: of the Spec.
    value: of the attribute, by which the array is there; None for any that is
      true.
    required: whether such a Spec needs the array, or merely allows it.
  """

  attribute: str
  value: Any = None
  required: bool = True

  def allows(self, found: Any) -> bool:
    """Whether the array is there by this value of the attribute."""
    return bool(found) if self.value is None else found == self.value

  def holds(self, spec: Any) -> bool:
    """Whether `spec` has the array."""
    return self.allows(getattr(spec, self.attribute))

  def told(self, spec: Any) -> str:
    """The attribute with its value, for errors."""
    return f"{self.attribute}={getattr(spec, self.attribute)!r}"


class Field(NamedTuple):
  """What is annotated of one field.

  Attributes:
    name: of the field.
    axes: its words; empty where it has none.
    dtype: by name, or None for floating.
    condition: which Specs have it, or None for all.
    optional: whether None is a value of it.
    nested: the NamedTuple of annotated fields that it is, or None.
  """

  name: str
  axes: tuple[str, ...]
  dtype: str | None
  condition: If | None
  optional: bool
  nested: Any

  @property
  def required(self) -> bool:
    """Whether None is an error where the condition holds."""
    return self.condition is not None and self.condition.required


@functools.cache
def fields(kind: Any) -> dict[str, Field]:
  """What a NamedTuple's fields are annotated with, by name."""
  found = {}
  hints = typing.get_type_hints(kind, include_extras=True)
  for name, hint in hints.items():
    extras = getattr(hint, "__metadata__", ())
    plain = hint.__origin__ if extras else hint
    union = isinstance(plain, python_types.UnionType)
    kinds = typing.get_args(plain) if union else (plain,)
    texts = [x for x in extras if isinstance(x, str)]
    conditions = [x for x in extras if isinstance(x, If)]
    found[name] = Field(
      name=name,
      axes=tuple(texts[0].split()) if texts else (),
      dtype=texts[1] if len(texts) > 1 else None,
      condition=conditions[0] if conditions else None,
      optional=type(None) in kinds,
      nested=next((x for x in kinds if hasattr(x, "_fields")), None),
    )
  return found


class Check:
  """Holds arrays to their words, and finds sizes on the way.

  Attributes:
    op: name of the op, for errors.
    spec: whose numbers are sizes.
    sizes: all that is known.
  """

  def __init__(self, op: str, spec: Any, sizes: Sizes | None = None):
    self.op, self.spec = op, spec
    self.sizes: Sizes = dict(sizes or {})

  def arrays(
    self,
    values: Any,
    label: str = "",
    names: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
    floats: int = 0,
  ) -> None:
    """Checks that an annotated NamedTuple fits, in shape and dtype.

    Args:
      values: of a type whose fields are annotated.
      label: what stands before a field's name in errors.
      names: field -> another name for it.
      without: words of axes that the arrays do not have.
      floats: bits that floating arrays need at least.

    Raises:
      ValueError: naming the array, its shape or dtype, and what is expected.
    """
    found = list(self._walk(values, label, names or {}))
    cut = [
      (name, tuple(a for a in field.axes if a not in without), field, x)
      for name, field, x in found
    ]
    for _, axes, _, x in cut:
      if len(axes) == x.ndim:
        for axis, size in zip(axes, x.shape, strict=True):
          if axis.isidentifier():
            self.sizes.setdefault(axis, self._of_spec(axis, size))
    for name, axes, field, x in cut:
      self.array(name, axes, x, dtype=field.dtype, floats=floats)

  def array(
    self,
    name: str,
    axes: tuple[str, ...],
    x: Any,
    *,
    dtype: str | None = None,
    floats: int = 0,
  ) -> None:
    """Checks one array; see `arrays`."""
    wanted = [self._allowed(axis) for axis in axes]
    if len(axes) != x.ndim or not all(
      not allowed or size in allowed
      for size, allowed in zip(x.shape, wanted, strict=True)
    ):
      told = ", ".join(map(_told, axes, wanted))
      raise ValueError(
        f"{self.op}: {name} has shape {x.shape}, expected [{told}]"
      )
    if dtype is None:
      fits = jnp.issubdtype(x.dtype, jnp.floating) and (
        jnp.finfo(x.dtype).bits >= floats
      )
      dtype = "float32 or float64" if floats else "a floating dtype"
    else:
      fits = x.dtype == jnp.dtype(dtype)
    if not fits:
      raise ValueError(
        f"{self.op}: {name} has dtype {x.dtype}, expected {dtype}"
      )

  def _walk(
    self, values: Any, label: str, names: Mapping[str, str]
  ) -> Iterator[tuple[str, Field, Any]]:
    """Arrays with words; raises where one is missing, or of no use."""
    for field in fields(type(values)).values():
      x = getattr(values, field.name)
      name = label + names.get(field.name, field.name)
      holds = field.condition is None or field.condition.holds(self.spec)
      if x is None:
        if not field.optional or (holds and field.required):
          raise ValueError(
            f"{self.op}: {name} is missing{self._why(field, 'needs it', label)}"
          )
      elif field.optional and not holds:
        why = self._why(field, "has no use for it", label)
        raise ValueError(f"{self.op}: {name} is given{why}")
      elif field.nested is not None:
        yield from self._walk(x, f"{name}.", {})
      elif field.axes:
        yield name, field, x

  def _why(self, field: Field, does: str, label: str) -> str:
    if field.condition is None:
      return ""
    same = "; make the state with the same spec" if label else ""
    return f", but {field.condition.told(self.spec)} {does}{same}"

  def _of_spec(self, axis: str, default: int) -> int:
    size = getattr(self.spec, axis, None)
    return size if isinstance(size, int) else default

  def _allowed(self, axis: str) -> tuple[int, ...]:
    """Sizes that an axis may have; empty if it is not known."""
    if "|" in axis:
      return tuple(map(int, axis.split("|")))
    if axis.isdigit():
      return (int(axis),)
    whole, _, part = axis.partition("/")
    size = self.sizes.get(whole)
    if size is None or not part:
      return () if size is None else (size,)
    parts = self._of_spec(part, 1)
    if size % parts:
      raise ValueError(f"{self.op}: {part}={parts} must divide {whole}={size}")
    return (size // parts,)


def zeros(kind: Any, spec: Any, sizes: Sizes, dtype: Any) -> Any:
  """An annotated NamedTuple of zeros.

  Args:
    kind: the NamedTuple.
    spec: whose numbers are sizes, and which says what is None.
    sizes: of all other words.
    dtype: of floating arrays.

  Raises:
    ValueError: a size is missing.
  """
  values = {}
  for name, field in fields(kind).items():
    if field.condition is not None and not field.condition.holds(spec):
      values[name] = None
    elif field.nested is not None:
      values[name] = zeros(field.nested, spec, sizes, dtype)
    else:
      shape = []
      for axis in field.axes:
        size = getattr(spec, axis, None)
        size = size if isinstance(size, int) else sizes.get(axis)
        if size is None:
          raise ValueError(f"{axis} is missing")
        shape.append(size)
      values[name] = jnp.zeros(shape, field.dtype or dtype)
  return kind(**values)


def _told(axis: str, allowed: tuple[int, ...]) -> str:
  """An axis in an error: its word, and the size that it must have."""
  if axis.isdigit() or "|" in axis:
    return " or ".join(map(str, allowed))
  return f"{axis}={allowed[0]}" if allowed else axis
