"""The batches that the data pipeline passes to the model."""

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
  """Tokens in rows; one row has the same fields without `batch`.

  Attributes:
    tokens: int32 `[batch, time]`, ids in [0, vocab_size); 0 in padding.
    targets: int32 `[batch, time]`, the next token; -1 if there is none (the
      last token of a document, padding), or if it is not scored (outside of
      answers). Exclude those from the loss.
    segment_ids: int32 `[batch, time]`; 0 is padding, other values identify the
      document of a token. With packing "stream", a document keeps its id across
      batches; otherwise ids count 1, 2, ... within the row.
    positions: int32 `[batch, time]`, position of the token in its segment (in
      its document for packing "stream"), from 0; 0 in padding.
  """

  tokens: np.ndarray
  targets: np.ndarray
  segment_ids: np.ndarray
  positions: np.ndarray


def padding(*shape: int) -> Batch:
  """Returns a batch (or row) of padding only."""
  return Batch(
    tokens=np.zeros(shape, np.int32),
    targets=np.full(shape, -1, np.int32),
    segment_ids=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
  )
