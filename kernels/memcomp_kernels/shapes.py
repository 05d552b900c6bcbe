"""Shapes in words: what the annotations of `Inputs` and `State` mean.

  query: Annotated[jax.Array, "batch time heads key_dim"]
  skip: Annotated[jax.Array | None, "batch time heads 1", If("skip")]
  position: Annotated[jax.Array, "batch", "int32"]

An axis is one of

  a word        the Spec's number of that name, else a size that is the same in
                all arrays
  a number      this size
  "1|2"         one of these sizes
  "heads/parts" the quotient of two words, without a remainder

Arrays are floating unless a dtype follows the words. `If` says which Specs
have the array. From these words the ops derive checks, states of zeros, errors
and signatures.
"""

import dataclasses
import functools
import numbers
import types as python_types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Sizes = dict[str, int]
"""Maps the word of an axis to its size."""
SIZES = ("batch", "heads", "key_dim", "value_dim")
"""Words whose sizes `init_state` takes in every op."""
_WIDTHS = ("key_dim", "value_dim")
"""Axes whose size must be at least 1. Batch, time and heads may be 0."""


@dataclasses.dataclass(frozen=True)
class If:
  """Says which Specs have an array.

  Attributes:
    attribute: name of an attribute of the Spec.
    value: value of the attribute for which the array exists. None means any
      true value.
    required: whether such a Spec needs the array, or only allows it.
  """

  attribute: str
  value: Any = None
  required: bool = True

  def allows(self, found: Any) -> bool:
    """Whether the array exists for this value of the attribute."""
    return bool(found) if self.value is None else found == self.value

  def holds(self, spec: Any) -> bool:
    """Whether `spec` has the array."""
    return self.allows(getattr(spec, self.attribute))

  def told(self, spec: Any) -> str:
    """Returns the attribute with its value, for errors."""
    return f"{self.attribute}={getattr(spec, self.attribute)!r}"


class Field(NamedTuple):
  """The annotation of one field.

  Attributes:
    name: name of the field.
    axes: words of its axes; empty if it has none.
    dtype: name of the dtype, or None for a floating dtype.
    condition: which Specs have the field, or None for all.
    optional: whether the field may be None.
    nested: the type of the field if that is a NamedTuple of annotated fields,
      else None.
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
  """Returns the annotations of a NamedTuple's fields, by name."""
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
  """Checks arrays against their annotations and collects sizes meanwhile.

  Attributes:
    op: name of the op, for errors.
    spec: the Spec whose numbers are sizes.
    sizes: all sizes known so far.
  """

  def __init__(self, op: str, spec: Any):
    self.op, self.spec = op, spec
    self.sizes: Sizes = {}

  def arrays(
    self,
    values: Any,
    label: str = "",
    names: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
    floats: int = 0,
  ) -> None:
    """Checks shapes and dtypes of an annotated NamedTuple.

    Args:
      values: a NamedTuple whose fields are annotated.
      label: prefix of a field's name in errors.
      names: maps a field to another name for it.
      without: words of axes that the arrays do not have.
      floats: minimum number of bits of floating arrays.

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
    """Checks one array; see `arrays` for the arguments."""
    wanted = [self._allowed(axis) for axis in axes]
    if len(axes) != x.ndim or not all(
      not allowed or size in allowed
      for size, allowed in zip(x.shape, wanted, strict=True)
    ):
      told = ", ".join(map(_told, axes, wanted))
      raise ValueError(
        f"{self.op}: {name} has shape {x.shape}, expected [{told}]"
      )
    for axis, size in zip(axes, x.shape, strict=True):
      if axis in _WIDTHS and size == 0:
        raise ValueError(
          f"{self.op}: {name} has shape {x.shape}; {axis} must be at least 1"
        )
    if dtype is None:
      fits = jnp.issubdtype(x.dtype, jnp.floating) and (
        jnp.finfo(x.dtype).bits >= max(floats, 16)
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
    """Yields annotated arrays; raises if one is missing or has no use."""
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
        if not hasattr(x, "ndim"):
          kind = type(x).__name__
          raise TypeError(f"{self.op}: {name} is of type {kind}, no array")
        yield name, field, x

  def _why(self, field: Field, does: str, label: str) -> str:
    if field.condition is None:
      return ""
    same = "; make the state with the same spec" if label else ""
    return f", but {field.condition.told(self.spec)} {does}{same}"

  def _of_spec(self, axis: str, default: int) -> int:
    size = getattr(self.spec, axis, None)
    return int(size) if isinstance(size, numbers.Integral) else default

  def _allowed(self, axis: str) -> tuple[int, ...]:
    """Returns the sizes that an axis may have; empty if none is known."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSizes:
  """Sizes and dtype of the state that an op makes before the first token.

  Attributes:
    batch: number of rows.
    heads: number of heads.
    key_dim: width of keys; None if it was not given.
    value_dim: width of values; None if it was not given.
    dtype: dtype of floating arrays.
  """

  batch: int
  heads: int
  key_dim: Any
  value_dim: Any
  dtype: Any

  def filled(
    self, given: Any, *shape: int | None, default: float = 0.0
  ) -> jax.Array:
    """Returns an array for all rows and heads.

    Args:
      given: `[heads, *shape]`, or what broadcasts to it. None is the default.
      shape: all axes after the heads.
      default: number in place of an array that is not given.

    Raises:
      ValueError: a size is missing.
    """
    if None in shape:
      raise ValueError("key_dim or value_dim is missing")
    given = jnp.asarray(default if given is None else given, self.dtype)
    whole = (self.batch, self.heads, *shape)
    try:
      return jnp.broadcast_to(given, whole)
    except ValueError:
      raise ValueError(
        f"an initial value has shape {given.shape}, expected {whole[1:]} (heads"
        " first) or what broadcasts to it"
      ) from None

  def counts(self) -> jax.Array:
    """Returns a zero for each row."""
    return jnp.zeros(self.batch, jnp.int32)


def zeros(kind: Any, spec: Any, sizes: Sizes, dtype: Any) -> Any:
  """Returns an annotated NamedTuple of zeros.

  Args:
    kind: the NamedTuple.
    spec: the Spec, whose numbers are sizes, and which decides which fields are
      None.
    sizes: sizes of all other words.
    dtype: dtype of floating arrays.

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
        if not isinstance(size, numbers.Integral):
          size = sizes.get(axis)
        if size is None:
          raise ValueError(f"{axis} is missing")
        shape.append(size)
      values[name] = jnp.zeros(shape, field.dtype or dtype)
  return kind(**values)


def without_unused(values: Any, spec: Any) -> Any:
  """Returns an annotated NamedTuple with zeros for arrays that are ignored.

  These are the arrays that every call has, and that some Specs do not use, such
  as the decay of a memory without a forget gate.
  """
  unused = {
    name: jnp.zeros_like(getattr(values, name))
    for name, field in fields(type(values)).items()
    if not field.optional
    and field.condition
    and not field.condition.holds(spec)
  }
  return values._replace(**unused)


def _told(axis: str, allowed: tuple[int, ...]) -> str:
  """Returns an axis as errors show it: its word, and its required size."""
  if axis.isdigit() or "|" in axis:
    return " or ".join(map(str, allowed))
  return f"{axis}={allowed[0]}" if allowed else axis
