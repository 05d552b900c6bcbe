"""The arguments of a direct call of an op: names, signature, documentation.

A direct call is `op(q, k, v, ...)`. Everything here is derived from an `op.Op`:
the fields of its `Inputs` and `Spec`, their annotated shapes, and their
docstrings.
"""

import collections
import dataclasses
import inspect
import textwrap
from collections.abc import Container, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from memcomp_kernels import checks, shapes

NAMES = {"query": "q", "key": "k", "value": "v", "log_decay": "g"}
"""Maps a field of `Inputs` to its name in the direct calls of all ops."""

CALL = """\
state: the state before the first token; the default is a fresh one. Its
  other name is `initial_state`.
segment_ids: integers `[batch, time]` that name the document of each token in
  packed rows; 0 is padding.
reset_state: the state that new segments start from: a state, or
  `memcomp_kernels.FRESH`. A call with `segment_ids` and `state` needs it.
  Without `segment_ids` it is ignored.
max_position: an upper bound of the tokens that `state` and `reset_state` have
  seen. Memories that grow are faster with it.
implementation: a name, or several names in order of preference. The default
  is the fastest on the platform that supports the call.
output_final_state: if False, None is returned in place of the state."""
"""The arguments of every direct call besides arrays and fields of the Spec."""


def names(op: Any) -> dict[str, str]:
  """Maps names in a direct call to fields of `Inputs`, in the call's order."""
  short = NAMES | dict(op.names)
  found = {
    short.get(name, name): name
    for name, field in shapes.fields(op.Inputs).items()
    if not _unused(op, field)
  }
  return {name: found[name] for name in op.order} | found


def bind(
  op: Any, arrays: tuple, keywords: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
  """Sorts the arguments of a direct call.

  Fields of the Spec that are not given are inferred from the arrays. These are
  sizes (`num_slots`), their quotients (`heads_per_group`) and flags that tell
  whether an array exists (`forget_gate`).

  Returns:
    The op's `Inputs`, its `Spec`, and options of `init_state` by name.

  Raises:
    TypeError: an argument is unknown, missing, given twice or of a wrong type;
      the message names it.
    ValueError: the Spec rejects its values.
  """
  if len(arrays) > len(op.order):
    raise TypeError(
      f"{op.name}: {len(arrays)} arrays by position; it takes"
      f" {', '.join(op.order)} so, and all others by keyword"
    )
  of_spec = _spec_fields(op)
  fields = names(op)
  fields |= {x: x for x in fields.values() if x not in of_spec}
  given: dict[str, Any] = {}
  spec: dict[str, Any] = {}
  options: dict[str, Any] = {}
  pairs = [*zip(op.order, arrays, strict=False), *keywords.items()]
  for name, x in pairs:
    if name in fields:
      field = fields[name]
      if field in given and x is not None:
        raise TypeError(f"{op.name}: {name} is given twice")
      if x is not None:
        given[field] = _array(op, name, shapes.fields(op.Inputs)[field], x)
    elif name in of_spec:
      spec[name] = x
    elif name in op.options:
      if x is not None:
        options[name] = x
    else:
      takes = [*names(op), *of_spec, *op.options]
      raise TypeError(
        f"{op.name}: no argument {name!r}; beside those of every call it takes"
        f" {', '.join(takes)}"
      )
  found = _follow(op, given)
  try:
    meaning = op.Spec(**dict(op.fixed) | found | spec)
  except TypeError as error:
    raise TypeError(f"{op.name}: {error}") from None
  return _inputs(op, given, meaning), meaning, options


def _spec_fields(op: Any) -> dict[str, dataclasses.Field]:
  """Returns the fields of the Spec that a direct call takes."""
  fields = dataclasses.fields(op.Spec)
  return {f.name: f for f in fields if f.name not in op.fixed}


def _unused(op: Any, field: shapes.Field) -> bool:
  """Whether the options that the op's name fixes make an array useless."""
  condition = field.condition
  return (
    condition is not None
    and condition.attribute in op.fixed
    and not condition.allows(op.fixed[condition.attribute])
  )


def _gate(op: Any, field: shapes.Field) -> bool:
  """Whether the last axis is 1 by default, so that a call may leave it out."""
  last = field.axes[-1]
  default = getattr(_spec_fields(op).get(last), "default", None)
  return last in ("1", "1|2") or default == 1


def _array(op: Any, name: str, field: shapes.Field, x: Any) -> jax.Array:
  x = checks.array(op, name, x)
  if _gate(op, field) and x.ndim == len(field.axes) - 1:
    return x[..., None]
  return x


def _follow(op: Any, given: dict[str, jax.Array]) -> dict[str, Any]:
  """Returns the fields of the Spec that can be inferred from the arrays."""
  known, found = _spec_fields(op), {}
  sizes: dict[str, int] = {}
  for name, field in shapes.fields(op.Inputs).items():
    x, condition = given.get(name), field.condition
    if condition is not None and condition.attribute in known:
      flag = isinstance(known[condition.attribute].default, bool)
      if condition.value is None and flag:
        found[condition.attribute] = x is not None
      elif condition.value is not None and x is not None:
        if condition.attribute in found:
          rivals = ", ".join(_choices(op, condition.attribute, given))
          raise TypeError(f"{op.name}: give one alone: {rivals}")
        found[condition.attribute] = condition.value
    if x is not None and x.ndim == len(field.axes):
      for axis, size in zip(field.axes, x.shape, strict=True):
        sizes.setdefault(axis, size)
  for axis, size in sizes.items():
    whole, _, part = axis.partition("/")
    if axis in known:
      found[axis] = size
    elif part in known and whole in sizes and size:
      # What does not divide is an error of shapes, which says so.
      found[part] = max(1, sizes[whole] // size)
  return found


def _choices(op: Any, attribute: str, among: Container[str]) -> list[str]:
  """Names the arrays in `among` that ask for a value of an option."""
  return [
    f"{name} for {attribute}={condition.value!r}"
    for name, field in names(op).items()
    if field in among
    and (condition := shapes.fields(op.Inputs)[field].condition) is not None
    and condition.attribute == attribute
  ]


def _inputs(op: Any, given: dict[str, jax.Array], spec: Any) -> Any:
  """Returns `Inputs`, with None or zeros for arrays that the Spec ignores."""
  public = {field: name for name, field in names(op).items()}
  arrays: dict[str, Any] = dict(given)
  missing: list[str] = []
  for name, field in shapes.fields(op.Inputs).items():
    if name in given:
      continue
    condition = field.condition
    unread = condition is not None and not condition.holds(spec)
    if field.optional and (unread or not (condition and condition.required)):
      arrays[name] = None
    elif not unread:
      ways: list[str] = []
      if condition is not None and condition.value is not None:
        ways = _choices(op, condition.attribute, shapes.fields(op.Inputs))
      alone = public.get(name, name)
      missing.append(" or ".join(ways) if len(ways) > 1 else alone)
    elif (like := given.get("query")) is not None:
      arrays[name] = jnp.zeros((*like.shape[:3], 1), jnp.float32)
  if missing:
    raise TypeError(f"{op.name}: missing {', '.join(missing)}")
  return op.Inputs(**arrays)


def signature(op: Any) -> inspect.Signature:
  """Returns what `inspect.signature` and editors show of a direct call."""
  parameters = []
  for name, field in _arrays(op).items():
    kind = inspect.Parameter.KEYWORD_ONLY
    if name in op.order:
      kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    annotation: Any = Annotated[jax.Array, " ".join(_axes(op, field))]
    default = None if _may_miss(op, field) else inspect.Parameter.empty
    parameters.append(
      inspect.Parameter(name, kind, default=default, annotation=annotation)
    )
  keyword_only = [
    p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for p in (
      *(inspect.signature(op.Spec).parameters[x] for x in _spec_fields(op)),
      *inspect.signature(type(op).__call__).parameters.values(),
      *op.options.values(),
    )
    if p.name not in ("self", "arrays", "keywords")
  ]
  returned = tuple[jax.Array, op.State]
  return inspect.Signature(
    parameters + keyword_only, return_annotation=returned
  )


def _arrays(op: Any) -> dict[str, shapes.Field]:
  fields = shapes.fields(op.Inputs)
  return {name: fields[field] for name, field in names(op).items()}


def _axes(op: Any, field: shapes.Field) -> tuple[str, ...]:
  """Returns the axes of an array in a direct call."""
  only_one = _gate(op, field) and field.axes[-1] == "1"
  return field.axes[:-1] if only_one else field.axes


def _may_miss(op: Any, field: shapes.Field) -> bool:
  """Whether a call may leave an array out."""
  condition = field.condition
  if condition is None:
    return field.optional
  return condition.attribute not in op.fixed


def documentation(op: Any) -> str:
  """Returns the `help` of an op: the call, its meaning, its arguments."""
  call = f"{op.name}{_short(signature(op))} -> (y, state)"
  fields = _described(op.Inputs)
  arrays = {
    name: f"`[{', '.join(_axes(op, field))}]`; {fields[field.name]}"
    + (f" Also `{field.name}`." if name != field.name else "")
    for name, field in _arrays(op).items()
  }
  of_spec = _described(op.Spec)
  meaning = {name: of_spec[name] for name in _spec_fields(op)}
  parts = [
    textwrap.fill(call, 80, subsequent_indent="    "),
    inspect.cleandoc(op.about),
    _section("Arrays", arrays),
    _section("Meaning, fields of `Spec`", meaning) + _following(op),
    "Call:\n" + textwrap.indent(CALL, "  "),
  ]
  if op.options:
    options = "Fresh state, options of `init_state`: " + ", ".join(op.options)
    parts.append(textwrap.fill(options, 80, subsequent_indent="  "))
  parts.append(
    f"Returns y `[{op.output}]` in the dtype of q,\nand the state after the"
    " last token."
  )
  return "\n\n".join(parts)


def _following(op: Any) -> str:
  """Returns a line on the fields of the Spec that follow the arrays."""
  known, found = _spec_fields(op), []
  for field in _arrays(op).values():
    found += [axis for axis in field.axes if axis in known]
    if field.condition is not None and field.condition.attribute in known:
      found.append(field.condition.attribute)
  names = ", ".join(dict.fromkeys(found))
  return f"\n  Unless given, these follow the arrays: {names}." if names else ""


def _short(full: inspect.Signature) -> inspect.Signature:
  empty = inspect.Parameter.empty
  return full.replace(
    parameters=[p.replace(annotation=empty) for p in full.parameters.values()],
    return_annotation=inspect.Signature.empty,
  )


def _section(title: str, lines: Mapping[str, str]) -> str:
  wrapped = [
    textwrap.fill(
      f"{name}: {text}", 80, initial_indent="  ", subsequent_indent="    "
    )
    for name, text in lines.items()
  ]
  return "\n".join([f"{title}:", *wrapped])


def _described(kind: type) -> dict[str, str]:
  """Returns the field descriptions in a docstring's section `Attributes`."""
  text = inspect.getdoc(kind) or ""
  _, _, section = text.partition("Attributes:\n")
  found: dict[str, str] = collections.defaultdict(str)
  last = ""
  for line in textwrap.dedent(section).splitlines():
    name, colon, rest = line.partition(":")
    if colon and name.isidentifier():
      found[name] = rest.strip()
      last = name
    elif line.strip() and last:
      found[last] += " " + line.strip()
  return found
