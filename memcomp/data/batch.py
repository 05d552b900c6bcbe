"""What the data pipeline hands to the model."""

from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
  """Tokens laid into rows; one row has the same fields without `batch`.

  Attributes:
    tokens: int32 `[batch, time]`, ids in [0, vocab_size); 0 in padding.
    targets: int32 `[batch, time]`, the token that follows; -1 where none does
      (the last token of a document, padding): leave those out of the loss.
    segment_ids: int32 `[batch, time]`; 0 is padding, any other value names the
      document a token belongs to. Packing "stream" keeps a document's id from
      one batch to the next; elsewhere ids count 1, 2, ... within the row.
    positions: int32 `[batch, time]`, place of the token within its segment
      (within its document for packing "stream"), from 0; 0 in padding.
  """

  tokens: np.ndarray
  targets: np.ndarray
  segment_ids: np.ndarray
  positions: np.ndarray


def padding(*shape: int) -> Batch:
  """Returns a batch (or row) of nothing but padding."""
  return Batch(
    tokens=np.zeros(shape, np.int32),
    targets=np.full(shape, -1, np.int32),
    segment_ids=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
  )
