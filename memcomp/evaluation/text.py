"""The documents of a store as one stream of tokens or bytes."""

import numpy as np

from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib


class Stream:
  """All documents of a store end to end.

  Attributes:
    store: where they are.
    num_tokens: tokens in all.
  """

  def __init__(self, store: store_lib.TokenStore):
    self.store = store
    self.num_tokens = store.num_tokens
    self._offsets = store_lib.offsets_of(store.lengths)

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns tokens [start, stop), int32."""
    span = store_lib.pieces(self._offsets, start, stop)
    parts = [self.store.read(*piece) for piece in span]
    return np.concatenate([np.zeros(0, np.int32), *parts])


def as_bytes(
  store: store_lib.TokenStore, tokenizer: tokenizer_lib.Tokenizer
) -> np.ndarray:
  """Returns the text of a store, uint8 `[bytes]`."""
  tokens = Stream(store).read(0, store.num_tokens)
  if isinstance(tokenizer, tokenizer_lib.ByteTokenizer):
    return tokens.astype(np.uint8)
  table = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
  return np.frombuffer(b"".join(table[i] for i in tokens.tolist()), np.uint8)


def num_bytes(
  store: store_lib.TokenStore, tokenizer: tokenizer_lib.Tokenizer
) -> int:
  """Returns the length of `as_bytes` without making it."""
  if isinstance(tokenizer, tokenizer_lib.ByteTokenizer):
    return store.num_tokens
  return sum(
    int(tokenizer.bytes_of(store.read(i, 0, int(length))).sum(dtype=np.int64))
    for i, length in enumerate(store.lengths)
  )
