"""Patterns: a text that says which mixer each layer has.

  memory                   memory in every layer
  memory+window            the two alternate
  memory*3+window          three memory layers, one window layer, repeated
  memory*3,window          three memory layers; all other layers are window
  8*window,4*memory        eight window layers, then four memory layers
  2*(memory+window),local  memory and window twice, then local

Commas separate consecutive parts. A count precedes or follows what it repeats:
a name, or a part in parentheses. The first part without a count fills the
layers that the other parts leave. Further parts without a count occur once.
One-letter names may be written as a word: aab is a+a+b.

The model scans over the periods of a part, so repetitions do not enlarge the
program.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from memcomp.models import legacy_mixers

_NAME = r"[^\W\d]\w*"
_TERM, _PART = (
  re.compile(rf"(?:(\d+)\*)?({repeated})(?:\*(\d+))?")
  for repeated in (_NAME, rf"{_NAME}|\([^()]*\)")
)


class Cycle(NamedTuple):
  """Layers that cycle through the mixers `names`, `repeats` times."""

  names: tuple[str, ...]
  repeats: int


def parse(
  pattern: str, num_layers: int, names: Iterable[str]
) -> tuple[Cycle, ...]:
  """Splits a pattern into its parts.

  Args:
    pattern: text in the syntax above.
    num_layers: number of layers that it must fill.
    names: names of the existing mixers.

  Raises:
    ValueError: the syntax is wrong, a mixer is unknown, or the number of layers
      is not `num_layers`.
  """
  names = list(names)
  found, open_part = [], None
  try:
    for text in re.sub(r"\s*([*+,()])\s*", r"\1", pattern.strip()).split(","):
      turn, count = _part(text, names)
      if count is None and open_part is None:
        open_part = len(found)
      found.append(Cycle(turn, count or 1))
  except ValueError as error:
    raise ValueError(
      f"pattern={pattern!r}: {error}; there are {', '.join(names)}"
    ) from error
  if open_part is not None:
    part = found[open_part]
    rest = num_layers - sum(
      len(p.names) * p.repeats for i, p in enumerate(found) if i != open_part
    )
    if rest > 0 and rest % len(part.names) == 0:
      found[open_part] = part._replace(repeats=rest // len(part.names))
  total = sum(len(part.names) * part.repeats for part in found)
  if total != num_layers:
    raise ValueError(
      f"pattern={pattern!r} makes {total} layers, num_layers is {num_layers}"
    )
  return tuple(found)


def _part(text: str, names: list[str]) -> tuple[tuple[str, ...], int | None]:
  """Returns a part's period of mixers, and its count or None."""
  match = _PART.fullmatch(text)
  if not match:
    return _turn(text, names), None
  return _turn(match[2].strip("()"), names), _count(match)


def _turn(text: str, names: list[str]) -> tuple[str, ...]:
  """Expands a sum of names, words and counts to the mixers of a period."""
  known = legacy_mixers.letter_names(names) | {name: name for name in names}
  found = []
  for term in text.split("+"):
    match = _TERM.fullmatch(term)
    if not match:
      raise ValueError(
        f"{term!r} is no part; write names, as '{names[0]}', '{names[0]}*3+"
        f"{names[-1]}' or '8*{names[-1]},4*{names[0]}'"
      )
    word = match[2]
    turn = [word] if word in known else list(word)
    if not all(known.get(name) in names for name in turn):
      raise ValueError(f"there is no mixer {word!r}")
    found += [known[name] for name in turn] * (_count(match) or 1)
  return tuple(found)


def _count(match: re.Match[str]) -> int | None:
  """Returns the count before or after the repeated text, or None."""
  before, repeated, after = match.groups()
  counts = [int(count) for count in (before, after) if count]
  if len(counts) > 1 or 0 in counts:
    raise ValueError(f"{repeated!r} takes one count, of 1 or more")
  return counts[0] if counts else None
