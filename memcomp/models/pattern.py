"""Which mixer stands in which layer.

  "a"          every layer has mixer a
  "aab"        two of a, one of b, again and again
  "8*b,4*a"    eight layers of b, then four of a
  "aa,5*ba"    parts follow each other; one part without a count fills up

A part is one period of letters and how often it comes. Layers of a part are
scanned by period, so a program's size does not grow with the repetitions.
"""

import re
from typing import NamedTuple

_PART = re.compile(r"(?:(\d+)\*)?([a-c]+)")


class Part(NamedTuple):
  """`letters` once, `repeats` times."""

  letters: str
  repeats: int


def parse(pattern: str, num_layers: int) -> tuple[Part, ...]:
  """Splits a pattern into its parts.

  Args:
    pattern: as above, letters a to c.
    num_layers: that it must fill.

  Raises:
    ValueError: it is not a pattern, or does not fill `num_layers`.
  """
  found, open_part = [], None
  for text in pattern.split(","):
    match = _PART.fullmatch(text.strip())
    if not match or match[1] == "0":
      raise ValueError(
        f"pattern={pattern!r}: {text!r} is no part; write letters a, b, c, as"
        " 'aab', or '8*b,4*a'"
      )
    if match[1] is None and open_part is None:
      open_part = len(found)
    found.append(Part(match[2], int(match[1] or 1)))
  if open_part is not None:
    part = found[open_part]
    rest = num_layers - sum(
      len(p.letters) * p.repeats for i, p in enumerate(found) if i != open_part
    )
    if rest > 0 and rest % len(part.letters) == 0:
      found[open_part] = part._replace(repeats=rest // len(part.letters))
  total = sum(len(part.letters) * part.repeats for part in found)
  if total != num_layers:
    raise ValueError(
      f"pattern={pattern!r} makes {total} layers, num_layers is {num_layers}"
    )
  return tuple(found)


def letters(pattern: str, num_layers: int) -> str:
  """Returns the letter of every layer, in order."""
  return "".join(p.letters * p.repeats for p in parse(pattern, num_layers))
