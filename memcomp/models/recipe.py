"""How a preset is trained."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """What `configs/lm.py` takes beside the model.

  Attributes:
    sequence_length: tokens a row.
    batch_size: rows a step.
    steps: optimizer steps.
    packing: see `DataConfig.packing`.
    optimizer: fields of `OptimizerConfig`.
  """

  sequence_length: int
  batch_size: int
  steps: int
  packing: str
  optimizer: dict[str, Any]
