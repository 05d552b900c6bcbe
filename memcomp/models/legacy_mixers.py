"""Old configs with the fields `mixer`, `mixer_b`, `mixer_c`.

These models had at most three mixers, which patterns called a, b and c. Old
config files, flags, checkpoints, sessions and exports still load: the letters
refer to entries of `DecoderConfig.mixers`.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

FIELDS = {"mixer": "a", "mixer_b": "b", "mixer_c": "c"}
"""The old fields, and the letters of their mixers in patterns."""


def letter_names(names: Iterable[str]) -> dict[str, str]:
  """Returns the mixer name that each of a, b and c refers to.

  A letter that is itself a name refers to that mixer. The other letters refer,
  in order, to the first names that are not letters.
  """
  names = list(names)
  others = iter(name for name in names if name not in FIELDS.values())
  return {
    letter: letter if letter in names else next(others, letter)
    for letter in FIELDS.values()
  }


def upgrade(saved: dict[str, Any]) -> dict[str, Any]:
  """Replaces the old fields of a model's saved config by `mixers`.

  Args:
    saved: fields of a `DecoderConfig` of any version, as nested dicts.
  """
  if "mixers" in saved or "mixer" not in saved:
    return saved
  mixers = {letter: saved.get(field) for field, letter in FIELDS.items()}
  mixers = {letter: mixer for letter, mixer in mixers.items() if mixer}
  rest = {name: x for name, x in saved.items() if name not in FIELDS}
  return {"pattern": "a"} | rest | {"mixers": mixers}


def accept_old_fields[T](config_type: type[T]) -> type[T]:
  """Lets a dataclass with a field `mixers` accept the three old fields too.

  The old fields become constructor arguments (so `dataclasses.replace` takes
  them) and read-write attributes, but not dataclass fields.
  """
  changed: Any = config_type
  init = changed.__init__

  @functools.wraps(init)
  def init_with_old(self, **fields):
    old = {name: fields.pop(name) for name in FIELDS if name in fields}
    init(self, **fields)
    if old and "mixers" not in fields:
      (default,) = self.mixers.values()
      self.mixers, self.pattern = {"a": default}, self.pattern or "a"
    for name, mixer in old.items():
      setattr(self, name, mixer)

  changed.__init__ = init_with_old
  for field, letter in FIELDS.items():
    setattr(changed, field, _property(letter))
  return config_type


def _property(letter: str) -> property:
  def get(config):
    return config.mixers.get(letter_names(config.mixers)[letter])

  def put(config, mixer):
    name = letter_names(config.mixers)[letter]
    if mixer is None:
      config.mixers.pop(name, None)
    else:
      config.mixers[name] = mixer

  return property(get, put, doc=f"The mixer that was called {letter}, or None.")


def rename_like(config: Any, other: Any) -> Any:
  """Returns `config` with another model's names for its mixers.

  Names do not change results. If the layers of the two models differ in kind or
  arrangement, returns `config` unchanged.

  Args:
    config: a `DecoderConfig`.
    other: another `DecoderConfig`.
  """
  parts, wanted = config.parts(), other.parts()
  shapes = [[(len(p.names), p.repeats) for p in x] for x in (parts, wanted)]
  if shapes[0] != shapes[1]:
    return config
  pairs = set(zip(config.layer_names(), other.layer_names(), strict=True))
  renamed = dict(pairs)
  one_to_one = len(pairs) == len(renamed) == len(set(renamed.values()))
  alike = (type(config.mixers[a]) is type(other.mixers[b]) for a, b in pairs)
  if not one_to_one or not all(alike):
    return config
  unused = {n: m for n, m in config.mixers.items() if n not in renamed}
  used = {new: config.mixers[name] for name, new in renamed.items()}
  return dataclasses.replace(
    config, mixers=unused | used, pattern=other.pattern
  )
