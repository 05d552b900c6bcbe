"""How the layers of a model lie in its arrays: in stacks, scanned over."""

from typing import NamedTuple

from memcomp.models import decoder_config


class Stack(NamedTuple):
  """Blocks of one place in a part's period: every `period`-th layer.

  Attributes:
    name: the name of their mixer.
    part: number of the part.
    first: depth of the first of these layers.
    period: from each of them to the next.
    repeats: how many there are, along axis 0 of their parameters.
  """

  name: str
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
  for index, part in enumerate(config.parts()):
    period = len(part.names)
    for place, name in enumerate(part.names):
      stacks.append(Stack(name, index, depth + place, period, part.repeats))
    depth += period * part.repeats
  return tuple(stacks)
