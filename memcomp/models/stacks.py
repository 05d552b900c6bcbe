"""How a model's layers are stacked in its arrays."""

from typing import NamedTuple

from memcomp.models import decoder_config


class Stack(NamedTuple):
  """Scanned blocks at one position of a part's period: every `period`-th layer.

  Attributes:
    name: name of their mixer.
    part: index of the part.
    first: depth of the first of these layers.
    period: distance between consecutive layers.
    repeats: number of layers, along axis 0 of their parameters.
  """

  name: str
  part: int
  first: int
  period: int
  repeats: int

  @property
  def depths(self) -> range:
    """Depths of these layers."""
    return range(
      self.first, self.first + self.period * self.repeats, self.period
    )


def stacks_of(config: decoder_config.DecoderConfig) -> tuple[Stack, ...]:
  """Returns the stacks of `Decoder.layers`."""
  stacks, depth = [], 0
  for index, part in enumerate(config.parts()):
    period = len(part.names)
    for place, name in enumerate(part.names):
      stacks.append(Stack(name, index, depth + place, period, part.repeats))
    depth += period * part.repeats
  return tuple(stacks)
