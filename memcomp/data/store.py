"""Random access to the tokens of documents."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

Keep = Callable[[str], bool]
"""Selects the documents of a split by name."""


class Sizes(NamedTuple):
  """Bytes of documents whose tokens do not spell their text.

  Of conversations only the answers count, except in shards of early versions.

  Attributes:
    text: int64 `[documents]`, bytes of the text.
    weight: int64 `[documents]`, total weight of the document's tokens, which
      share the text's bytes by weight (`tokenizer.weights`); 0 if the text's
      bytes are unknown.
  """

  text: np.ndarray
  weight: np.ndarray


class Scored:
  """The tokens of documents that the loss counts, as spans.

  Attributes:
    counts: int64 `[documents]`, number of spans of each document.
    spans: int64 `[spans, 2]`, first token and end of each in its document; a
      document's spans are adjacent, in order, and do not overlap.
  """

  def __init__(self, counts: np.ndarray, spans: np.ndarray):
    self.counts = np.asarray(counts, np.int64)
    self.spans = np.asarray(spans, np.int64).reshape(-1, 2)
    self._first = offsets_of(self.counts)
    if self._first[-1] != len(self.spans):
      raise ValueError(f"{self._first[-1]} spans, not {len(self.spans)}")

  def mask(self, document: int, start: int, stop: int) -> np.ndarray:
    """Whether each of tokens [start, stop) counts, bool `[stop - start]`."""
    first, end = self._first[document : document + 2]
    begun, ended = (
      np.searchsorted(edges, np.arange(start, stop), side="right")
      for edges in self.spans[first:end].T
    )
    return begun > ended

  def of(self, documents: np.ndarray) -> "Scored":
    """Returns the spans of some documents, int `[documents]`."""
    counts = self.counts[documents]
    # Each span's place: its document's first, and its number there.
    number = np.arange(counts.sum()) - np.repeat(
      np.cumsum(counts) - counts, counts
    )
    places = np.repeat(self._first[documents], counts) + number
    return Scored(counts, self.spans[places])


class TokenStore(Protocol):
  """Documents of tokens.

  Attributes:
    name: name for messages.
    lengths: int64 `[documents]`, tokens of each document, >= 1.
    num_tokens: total number of tokens.
    fingerprint: 16 hex digits; equal for stores of equal documents.
    sizes: text sizes; None if the tokens spell the text, as far as is known.
    scored: the tokens that the loss counts; None for all.
  """

  name: str
  lengths: np.ndarray
  num_tokens: int
  fingerprint: str
  sizes: Sizes | None
  scored: Scored | None

  def read(self, document: int, start: int, stop: int) -> np.ndarray:
    """Returns tokens [start, stop) of a document, int32 `[stop - start]`."""
    ...


class DocumentNames(Sequence[str]):
  """Names of documents, without storing a string for each.

  Attributes:
    files: names of files.
    file: int32 `[documents]`, index into `files`.
    line: int64 `[documents]`, position in the file (line number for .jsonl); 0
      if the document is the whole file.
  """

  def __init__(self, files: Sequence[str], file: np.ndarray, line: np.ndarray):
    self.files = files
    self.file = file
    self.line = line

  def __len__(self) -> int:
    return len(self.file)

  def __getitem__(self, index):
    line = int(self.line[index])
    return document_name(self.files[int(self.file[index])], line)


def document_name(file: str, line: int) -> str:
  """Returns the name of the document at `line` of `file` (0: all of it)."""
  return f"{file}:{line}" if line else file


class ArrayStore:
  """All tokens in one array."""

  def __init__(
    self,
    name: str,
    tokens: np.ndarray,
    lengths: np.ndarray,
    sizes: Sizes | None = None,
    scored: Scored | None = None,
  ):
    """Wraps an array.

    Args:
      name: name for messages.
      tokens: `[num_tokens]` of any integer type.
      lengths: `[documents]`, with sum `num_tokens`.
      sizes: see `TokenStore`.
      scored: see `TokenStore`.
    """
    self.name = name
    self.sizes = sizes
    self.scored = scored
    self.lengths = np.asarray(lengths, np.int64)
    self.num_tokens = int(self.lengths.sum())
    marks = () if scored is None else (scored.counts, scored.spans)
    self.fingerprint = digest(self.lengths, tokens.dtype.str, tokens, *marks)
    self._tokens = tokens
    self._offsets = offsets_of(self.lengths)

  def read(self, document: int, start: int, stop: int) -> np.ndarray:
    """See `TokenStore.read`."""
    first = self._offsets[document]
    return self._tokens[first + start : first + stop].astype(np.int32)


class Subset:
  """Some documents of a store."""

  def __init__(self, store: TokenStore, documents: np.ndarray):
    """Wraps a store.

    Args:
      store: the store with the tokens.
      documents: int64 `[documents]`, indices into the store's documents, in
        order.
    """
    self.name = store.name
    self.lengths = store.lengths[documents]
    self.num_tokens = int(self.lengths.sum())
    self.fingerprint = digest(store.fingerprint, documents)
    self.sizes = store.sizes and Sizes(*(x[documents] for x in store.sizes))
    self.scored = store.scored and store.scored.of(documents)
    self._store = store
    self._documents = documents

  def read(self, document: int, start: int, stop: int) -> np.ndarray:
    """See `TokenStore.read`."""
    return self._store.read(int(self._documents[document]), start, stop)


class Concatenation:
  """Several stores, one after the other; all or none have `scored`."""

  def __init__(self, stores: Sequence[TokenStore]):
    self.stores = tuple(stores)
    self.name = ",".join(s.name for s in self.stores)
    self.lengths = np.concatenate([s.lengths for s in self.stores])
    self.num_tokens = int(self.lengths.sum())
    self.fingerprint = digest(*(s.fingerprint for s in self.stores))
    self._first = offsets_of(np.array([len(s.lengths) for s in self.stores]))
    self.sizes = None
    if any(s.sizes for s in self.stores):
      parts = [s.sizes or _no_sizes(len(s.lengths)) for s in self.stores]
      self.sizes = Sizes(*map(np.concatenate, zip(*parts, strict=True)))
    self.scored = None
    if marks := [s.scored for s in self.stores if s.scored]:
      self.scored = Scored(
        np.concatenate([x.counts for x in marks]),
        np.concatenate([x.spans for x in marks]),
      )

  def read(self, document: int, start: int, stop: int) -> np.ndarray:
    """See `TokenStore.read`."""
    part = int(np.searchsorted(self._first, document, side="right")) - 1
    return self.stores[part].read(document - self._first[part], start, stop)


class Mixture(Concatenation):
  """Several stores, sampled by weight; reads see their concatenation.

  Attributes:
    stores: the parts.
    weights: share of the rows from each part, > 0, with sum 1.
  """

  def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float]):
    super().__init__(stores)
    self.weights = tuple(float(w) / sum(weights) for w in weights)
    self.fingerprint = digest(self.fingerprint, np.array(self.weights))


def subset(store: TokenStore, names: Sequence[str], keep: Keep) -> TokenStore:
  """Returns the documents of `store` with names that `keep` accepts."""
  kept = np.array([keep(name) for name in names], bool)
  return store if kept.all() else Subset(store, np.flatnonzero(kept))


def sizes_of(documents: Sequence[Sequence[int]] | np.ndarray) -> Sizes | None:
  """Returns sizes from the `tokenizer.measure` of each document."""
  text, weight, spelled = np.array(documents, np.int64).reshape(-1, 3).T
  return None if (text == spelled).all() else Sizes(text, weight)


def _no_sizes(count: int) -> Sizes:
  return Sizes(*np.zeros((2, count), np.int64))


def offsets_of(lengths: np.ndarray) -> np.ndarray:
  """Returns the start of each document, and the end: int64 `[documents+1]`."""
  return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=int)])


def pieces(
  offsets: np.ndarray, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
  """Finds the documents in a span of the stream of all documents.

  Args:
    offsets: offsets of the documents, from `offsets_of`.
    start: first token of the span.
    stop: end of the span, exclusive.

  Yields:
    (document, begin, end): tokens [begin, end) of that document.
  """
  document = int(np.searchsorted(offsets, start, side="right")) - 1
  while start < stop:
    end = min(stop, int(offsets[document + 1]))
    if end > start:
      first = int(offsets[document])
      yield document, start - first, end - first
    start = max(start, end)
    document += 1


def digest(*parts: str | np.ndarray) -> str:
  """Returns 16 hex digits of the SHA-256 of `parts`."""
  result = hashlib.sha256()
  for part in parts:
    content = (
      part.encode() if isinstance(part, str) else np.ascontiguousarray(part)
    )
    result.update(content)
    result.update(b"\0")
  return result.hexdigest()[:16]
