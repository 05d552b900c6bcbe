"""The documents of a store as one stream of tokens or bytes."""

import itertools

import numpy as np

from memcomp.data import store as store_lib
from memcomp.data import tokenizer as tokenizer_lib


class Stream:
  """The concatenation of all documents of a store.

  Attributes:
    store: the store.
    num_tokens: total number of tokens.
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

  def scored(self, start: int, stop: int) -> np.ndarray:
    """Whether each of tokens [start, stop) is scored, bool."""
    marks = self.store.scored
    if marks is None:
      return np.ones(stop - start, bool)
    span = store_lib.pieces(self._offsets, start, stop)
    parts = [marks.mask(*piece) for piece in span]
    return np.concatenate([np.zeros(0, bool), *parts])

  def windows(self, size: int) -> list[tuple[int, int]]:
    """Cuts the stream for scoring with a fresh state in each window.

    A window's first token is not predicted in it, but in the one before. A
    conversation starts a window of its own.

    Args:
      size: predicted tokens per window.

    Returns:
      (start, stop) of each window, at most `size + 1` tokens.
    """
    edges = [0, self.num_tokens]
    if self.store.scored is not None:
      edges = self._offsets.tolist()
    return [
      (start, min(start + size + 1, end))
      for first, end in itertools.pairwise(edges)
      for start in range(first, end - 1, size)
    ]

  def read_sized(
    self, tokenizer: tokenizer_lib.Tokenizer, start: int, stop: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [start, stop), and the text bytes of each as float64.

    If a document's tokens do not spell its text, they share its bytes in
    proportion to what they spell. The bytes always sum to the length of the
    text; of a conversation, those of its answers do.
    """
    parts, sizes = [np.zeros(0, np.int32)], [np.zeros(0)]
    for document, begin, end in store_lib.pieces(self._offsets, start, stop):
      tokens = self.store.read(document, begin, end)
      parts.append(tokens)
      sizes.append(_sizes(self.store, tokenizer, document, tokens))
    return np.concatenate(parts), np.concatenate(sizes)


def _sizes(
  store: store_lib.TokenStore,
  tokenizer: tokenizer_lib.Tokenizer,
  document: int,
  tokens: np.ndarray,
) -> np.ndarray:
  sizes = tokenizer.bytes_of(tokens).astype(np.float64)
  if store.sizes is None or not store.sizes.weight[document]:
    return sizes
  of_text, weight = store.sizes.text[document], store.sizes.weight[document]
  return tokenizer_lib.weights(sizes) * (of_text / weight)


def as_bytes(
  store: store_lib.TokenStore, tokenizer: tokenizer_lib.Tokenizer
) -> np.ndarray | None:
  """Returns the text of a store, uint8 `[bytes]`.

  None if the tokens do not determine it, for example with unknown words.
  """
  if isinstance(tokenizer, tokenizer_lib.ByteTokenizer):
    return Stream(store).read(0, store.num_tokens).astype(np.uint8)
  table = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
  texts = []
  for document, length in enumerate(store.lengths):
    tokens = store.read(document, 0, int(length))
    text = b"".join(table[i] for i in tokens.tolist())
    if store.sizes is not None and store.sizes.weight[document]:
      assert isinstance(tokenizer, tokenizer_lib.JsonTokenizer)
      text = tokenizer.decode(tokens, special=True).encode()
      if len(text) != store.sizes.text[document]:
        return None
    texts.append(text)
  return np.frombuffer(b"".join(texts), np.uint8)


def num_bytes(
  store: store_lib.TokenStore, tokenizer: tokenizer_lib.Tokenizer
) -> int:
  """Returns the bytes of a store's text; of conversations, the answers'."""
  if isinstance(tokenizer, tokenizer_lib.ByteTokenizer):
    if store.scored is not None:
      return int(np.diff(store.scored.spans).sum())
    return store.num_tokens
  total = 0.0
  for document, length in enumerate(store.lengths):
    tokens = store.read(document, 0, int(length))
    sizes = _sizes(store, tokenizer, document, tokens)
    if store.scored is not None:
      sizes = sizes[store.scored.mask(document, 0, int(length))]
    total += sizes.sum()
  return round(total)
