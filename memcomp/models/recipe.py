"""The training recipe of a preset."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """The settings of `configs/lm.py` besides the model.

  Attributes:
    sequence_length: tokens per row.
    batch_size: rows per step.
    steps: number of optimizer steps.
    packing: see `DataConfig.packing`.
    optimizer: fields of `OptimizerConfig`.
  """

  sequence_length: int
  batch_size: int
  steps: int
  packing: str
  optimizer: dict[str, Any]
