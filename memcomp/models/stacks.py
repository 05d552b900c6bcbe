"""How the layers of a model lie in its arrays: in stacks, scanned over."""

from typing import NamedTuple

from memcomp.models import decoder_config
from memcomp.models import pattern as pattern_lib


class Stack(NamedTuple):
  """Blocks of one place in a part's period: every `period`-th layer.

  Attributes:
    letter: of the pattern.
    part: number of the part.
    first: depth of the first of these layers.
    period: from each of them to the next.
    repeats: how many there are, along axis 0 of their parameters.
  """

  letter: str
  part: int
  first: int
  period: int
  repeats: int

  @property
  def depths(self) -> range:
    """Of these layers."""
    return range(
      self.first, self.first + self.period * self.repeats, self.period
    )


def stacks_of(config: decoder_config.DecoderConfig) -> tuple[Stack, ...]:
  """Returns how the layers of a model lie in `Decoder.layers`."""
  stacks, depth = [], 0
  parts = pattern_lib.parse(config.pattern, config.num_layers)
  for index, part in enumerate(parts):
    period = len(part.letters)
    for place, letter in enumerate(part.letters):
      stacks.append(Stack(letter, index, depth + place, period, part.repeats))
    depth += period * part.repeats
  return tuple(stacks)
