"""Packs documents into rows of a fixed length, each computed on demand.

Every class here is a plan over the lengths of a store; `plan[i]` reads only the
tokens of row i. Except in `Joined`, the target of a token is the next token of
its document, even if a row ends between the two. So each token except a
document's first is predicted once per epoch; `Concat` drops the tokens after
the last row that a token follows. If the store has `scored`, only scored tokens
are targets; `Joined` cannot do this, so `sources.check` refuses it for
conversations.
"""

import functools
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from memcomp import errors
from memcomp.data import batch as batch_lib
from memcomp.data import order as order_lib
from memcomp.data import store as store_lib

PACKINGS = ("joined", "concat", "first_fit", "stream")

Piece = tuple[int, int, int, int, int]
"""(document, begin, end, segment id, position of the first token)."""


class Rows(Protocol):
  """Random access to rows.

  Indices of `Stream` and `Stretches` go on over epochs; others have one epoch.
  """

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> batch_lib.Batch: ...


class Joined:
  """All documents in one stream, cut into rows without boundaries.

  Row i has tokens [i L, (i + 1) L), and targets shifted by one. The remainder
  is dropped.
  """

  def __init__(self, store: store_lib.TokenStore, sequence_length: int):
    check_one_row(store, sequence_length)
    self._store = store
    self._length = sequence_length
    self._offsets = store_lib.offsets_of(store.lengths)

  def __len__(self) -> int:
    return (self._store.num_tokens - 1) // self._length

  def __getitem__(self, index: int) -> batch_lib.Batch:
    start = _in_range(index, len(self)) * self._length
    span = store_lib.pieces(self._offsets, start, start + self._length + 1)
    tokens = np.concatenate([self._store.read(*piece) for piece in span])
    # Copies, because grain's batches of one row are views of the row.
    return batch_lib.Batch(
      tokens=tokens[:-1].copy(),
      targets=tokens[1:].copy(),
      segment_ids=np.ones(self._length, np.int32),
      positions=np.arange(self._length, dtype=np.int32),
    )


class Concat(Joined):
  """The rows of `Joined` with documents as separate segments.

  A document that continues in the next row starts a new segment there.
  """

  def __init__(self, store: store_lib.TokenStore, sequence_length: int):
    super().__init__(store, sequence_length)
    check_targets(store)

  def __getitem__(self, index: int) -> batch_lib.Batch:
    start = _in_range(index, len(self)) * self._length
    span = store_lib.pieces(self._offsets, start, start + self._length)
    return _fill(
      self._store,
      ((*piece, segment, 0) for segment, piece in enumerate(span, 1)),
      self._length,
    )


class FirstFit:
  """Whole documents, each in the first row with room for it, padded.

  The order of documents is drawn from the seed. Documents longer than a row are
  first cut into rows. A tree over the free room gives exact first fit in O(n
  log n), about 4 s for a million documents.
  """

  def __init__(
    self, store: store_lib.TokenStore, sequence_length: int, *, seed: int
  ):
    check_some_text(store)
    check_targets(store)
    self._store = store
    self._length = sequence_length
    order = order_lib.permutation(len(store.lengths), "first_fit", seed)
    lengths = store.lengths[order]
    counts = -(-lengths // sequence_length)
    document = np.repeat(order, counts)
    first = np.cumsum(counts) - counts
    number = np.arange(len(document)) - np.repeat(first, counts)
    begin = number * sequence_length
    end = np.minimum(begin + sequence_length, np.repeat(lengths, counts))
    row = order_lib.first_fit(end - begin, sequence_length)
    by_row = np.argsort(row, kind="stable")
    self._pieces = np.stack([document, begin, end], axis=1)[by_row]
    self._first = np.searchsorted(row[by_row], np.arange(row.max() + 2))

  def __len__(self) -> int:
    return len(self._first) - 1

  def __getitem__(self, index: int) -> batch_lib.Batch:
    index = _in_range(index, len(self))
    chosen = self._pieces[self._first[index] : self._first[index + 1]]
    return _fill(
      self._store,
      ((*piece, i, 0) for i, piece in enumerate(chosen.tolist(), 1)),
      self._length,
    )


class Stream:
  """`num_streams` parallel streams that continue from step to step.

  In every epoch the documents are permuted, concatenated and cut into
  `num_streams` parts of equal length (to one token). Row b of step s is window
  s of part b, so its state can be carried from step to step. The last window of
  an epoch is padded. Indices continue over epochs: `(epoch * steps_per_epoch +
  step) * num_streams + b`.

  A segment id is the document's number plus one, and in odd epochs plus the
  number of documents. So a document that follows itself at the end of an epoch
  is not mistaken for its own continuation.
  """

  def __init__(
    self,
    store: store_lib.TokenStore,
    sequence_length: int,
    *,
    num_streams: int,
    seed: int,
    shuffle: bool,
    first_id: int = 1,
  ):
    """Makes the plan.

    Args:
      store: the documents.
      sequence_length: tokens per window.
      num_streams: rows per step.
      seed: seed of the order of documents.
      shuffle: whether to permute the documents.
      first_id: smallest segment id; smaller ids belong to other stores.

    Raises:
      UserError: fewer tokens than streams, or ids that exceed int32.
    """
    if store.num_tokens < num_streams:
      raise errors.UserError(
        f"{store.name}: {store.num_tokens} tokens cannot feed {num_streams} "
        "streams; give more text or a smaller batch_size"
      )
    check_targets(store)
    self.next_id = _next_id(store, first_id)
    self._store = store
    self._length = sequence_length
    self._num_streams = num_streams
    self._seed = seed
    self._shuffle = shuffle
    self._first_id = first_id
    longest = -(-store.num_tokens // num_streams)
    self.steps_per_epoch = -(-longest // sequence_length)
    # Two, because the prefetch may straddle the end of an epoch.
    self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

  def __len__(self) -> int:
    return self.steps_per_epoch * self._num_streams

  def __getitem__(self, index: int) -> batch_lib.Batch:
    step, stream = divmod(index, self._num_streams)
    epoch, step = divmod(step, self.steps_per_epoch)
    order, offsets = self._epoch(epoch if self._shuffle else 0)
    first_id = self._first_id + (epoch % 2) * len(order)
    num_tokens = self._store.num_tokens
    stop = (stream + 1) * num_tokens // self._num_streams
    start = stream * num_tokens // self._num_streams + step * self._length
    span = store_lib.pieces(offsets, start, min(start + self._length, stop))
    found = []
    for place, begin, end in span:
      document = int(order[place])
      found.append((document, begin, end, first_id + document, begin))
    return _fill(self._store, found, self._length)

  def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    size = len(self._store.lengths)
    if self._shuffle:
      order = order_lib.permutation(size, "stream", self._seed, epoch)
    else:
      order = np.arange(size)
    return order, store_lib.offsets_of(self._store.lengths[order])


class Stretches:
  """Streams that read a few windows, and then continue at another place.

  The documents in stored order are cut into stretches of `windows` windows, and
  each epoch permutes the stretches. Row b of step s reads window s % windows of
  its current stretch. So state can be carried through a stretch, while the
  batch stays a mixture of places. Indices are those of `Stream`, but an epoch
  may end within a step: only the last stretch of the text has padding.

  A segment id is the document's number plus one, and in every other stretch of
  a row plus the number of documents. So a document that continues after a jump
  is not mistaken for its own continuation.
  """

  def __init__(
    self,
    store: store_lib.TokenStore,
    sequence_length: int,
    *,
    num_streams: int,
    seed: int,
    windows: int,
    first_id: int = 1,
  ):
    """Makes the plan.

    Args:
      store: the documents.
      sequence_length: tokens per window.
      num_streams: rows per step.
      seed: seed of the order of stretches.
      windows: windows per stretch, >= 1.
      first_id: smallest segment id.

    Raises:
      UserError: no text, or ids that exceed int32.
    """
    check_some_text(store)
    check_targets(store)
    self.next_id = _next_id(store, first_id)
    self._store = store
    self._offsets = store_lib.offsets_of(store.lengths)
    self._length = sequence_length
    self._num_streams = num_streams
    self._windows = windows
    self._first_id = first_id
    self._count = -(-store.num_tokens // (sequence_length * windows))
    self.steps_per_epoch = -(-self._count // num_streams) * windows
    self._order = functools.lru_cache(maxsize=2)(
      functools.partial(order_lib.permutation, self._count, "stretches", seed)
    )

  def __len__(self) -> int:
    return self.steps_per_epoch * self._num_streams

  def __getitem__(self, index: int) -> batch_lib.Batch:
    step, stream = divmod(index, self._num_streams)
    turn, window = divmod(step, self._windows)
    epoch, number = divmod(turn * self._num_streams + stream, self._count)
    stretch = int(self._order(epoch)[number])
    start = (stretch * self._windows + window) * self._length
    stop = min(start + self._length, self._store.num_tokens)
    first_id = self._first_id + (turn % 2) * len(self._store.lengths)
    span = store_lib.pieces(self._offsets, min(start, stop), stop)
    return _fill(
      self._store,
      ((d, begin, end, first_id + d, begin) for d, begin, end in span),
      self._length,
    )


def check_one_row(store: store_lib.TokenStore, sequence_length: int):
  """Raises UserError if `store` does not fill one row."""
  if store.num_tokens < sequence_length + 1:
    raise errors.UserError(
      f"{store.name}: {store.num_tokens} tokens are fewer than one row needs "
      f"(sequence_length + 1 = {sequence_length + 1}); give more text or a "
      "smaller data.sequence_length"
    )


def check_targets(store: store_lib.TokenStore):
  """Raises UserError if there is nothing to predict in `store`.

  If documents are separate segments, the first token of each is not predicted.
  """
  if store.num_tokens and store.lengths.max() < 2:
    raise errors.UserError(
      f"{store.name}: nothing to score, for all {len(store.lengths)} documents"
      " are of one token, and the first of a document is not predicted; give"
      " longer documents, or set data.packing to joined"
    )


def check_some_text(store: store_lib.TokenStore):
  """Raises UserError if `store` is empty."""
  if not store.num_tokens:
    raise errors.UserError(f"{store.name}: no tokens; give some text")


def _next_id(store: store_lib.TokenStore, first_id: int) -> int:
  """Returns the first id after those of `store`, two per document."""
  next_id = first_id + 2 * len(store.lengths)
  if next_id > np.iinfo(np.int32).max:
    raise errors.UserError(
      f"{store.name}: {len(store.lengths)} documents are too many for 32-bit "
      "segment ids; join short documents, or use another packing"
    )
  return next_id


def _fill(
  store: store_lib.TokenStore, row: Iterable[Piece], sequence_length: int
) -> batch_lib.Batch:
  """Returns the row made of the pieces in `row`, then padding."""
  result = batch_lib.padding(sequence_length)
  at = 0
  for document, begin, end, segment, position in row:
    # Read one token more than fits, as the target of the last one.
    read = store.read(
      document, begin, min(end + 1, int(store.lengths[document]))
    )
    size = end - begin
    result.tokens[at : at + size] = read[:size]
    targets = read[1 : size + 1]
    if store.scored is not None:
      scored = store.scored.mask(document, begin + 1, begin + len(read))
      targets = np.where(scored, targets, -1)
    result.targets[at : at + len(read) - 1] = targets
    result.segment_ids[at : at + size] = segment
    result.positions[at : at + size] = np.arange(position, position + size)
    at += size
  return result


def _in_range(index: int, size: int) -> int:
  if not 0 <= index < size:
    raise IndexError(f"row {index} of {size}")
  return index
