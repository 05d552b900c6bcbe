"""Reads texts into sessions with the chunk form, piece by piece."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp import errors
from memcomp import progress as progress_lib
from memcomp.inference import session as session_lib
from memcomp.models import abstract, decoder

PIECE = 1024
"""Tokens of a text that are read in one call, which bounds its memory."""

_LEAST = 8
"""Tokens of the shortest piece: lengths double from here, for few programs."""


def read(
  model: decoder.Decoder,
  session: session_lib.Session,
  texts: Sequence[np.ndarray] | np.ndarray,
  *,
  piece_tokens: int = PIECE,
  widths: Sequence[int] = (),
) -> session_lib.Session:
  """Reads on in every row, with a line of progress where it takes long.

  Rows are padded on the left, and padding leaves a row's memory alone: each is
  read as if it were alone.

  Args:
    model: whose session it is.
    session: what it has read so far.
    texts: ids `[time]` for each row, of any lengths; they are sliced piece by
      piece, so a memory-mapped array stays on disk. An empty one leaves its
      row as it is.
    piece_tokens: of each text in one call; changes nothing but rounding.
    widths: those of pieces instead, rising, the first of a text the least that
      holds it: as many programs, for reading texts of many lengths.

  Returns:
    The session after the last token of each text.

  Raises:
    UserError: not one text for each row, or ids that the model has not.
  """
  rows = len(session.position)
  if len(texts) != rows:
    raise errors.UserError(
      f"{len(texts)} texts for the {rows} rows of the session: give one each"
    )
  lengths = np.array([len(text) for text in texts])
  before = np.asarray(session.position)
  graphdef, params = nnx.split(model)
  vocab = session.used.shape[1]
  total, room = int(lengths.max()), 0
  progress = progress_lib.Progress("reading, tokens", total)
  with session_lib.on_mesh_of(params):
    for start, stop in pieces(total, piece_tokens, widths):
      ids, real = columns(texts, total, start, stop)
      if ids.min() < 0 or ids.max() >= vocab:
        raise errors.UserError(
          f"id {ids.max() if ids.max() >= vocab else ids.min()} is none of the"
          f" model's {vocab}: use the tokenizer that it was trained with"
        )
      # Of those of a text behind its padding.
      needed = int(np.max(before + np.maximum(stop - total + lengths, 0)))
      if needed > room:
        session = session_lib.grow(model, session, needed)
        room = 1 << (needed - 1).bit_length()
      whole = real.all() and not widths
      segment_ids = None if whole else real.astype(np.int32)
      session = _read(graphdef, params, session, ids, segment_ids)
      # Pieces are queued otherwise, with what they need, all at once.
      session.position.block_until_ready()
      progress.advance(stop - max(start, 0))
  return session


def pieces(
  total: int, size: int, widths: Sequence[int] = ()
) -> Iterator[tuple[int, int]]:
  """Cuts `total` columns; the first piece may begin before them, at < 0.

  Args:
    total: columns.
    size: of a piece.
    widths: see `read`; the last takes the place of `size`.

  Yields:
    [start, stop) of each.
  """
  size = widths[-1] if widths else size
  rest = total % size
  if rest:
    doubling = max(_LEAST, 1 << (rest - 1).bit_length())
    width = next((w for w in widths if w >= rest), min(doubling, size))
    yield rest - width, rest
  for start in range(rest, total, size):
    yield start, start + size


def columns(
  texts: Sequence[np.ndarray] | np.ndarray, total: int, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns columns of texts as padded on the left to `total`.

  Returns:
    int32 `[texts, stop - start]`, and bool, which are of a text.
  """
  ids = np.zeros((len(texts), stop - start), np.int32)
  real = np.zeros(ids.shape, bool)
  for row, text in enumerate(texts):
    shift = total - len(text)
    part = text[max(start - shift, 0) : max(stop - shift, 0)]
    if len(part):
      ids[row, -len(part) :] = part
      real[row, -len(part) :] = True
  return ids, real


@functools.partial(jax.jit, static_argnums=0)
def _read(graphdef, params, session, ids, segment_ids) -> session_lib.Session:
  model = abstract.merge(graphdef, params)
  hidden, state = model.hidden(
    ids, state=session.state, segment_ids=segment_ids
  )
  logits = model.logits(hidden[:, -1])
  real = jnp.ones(ids.shape, bool) if segment_ids is None else segment_ids != 0
  # Where the last column is padding, so are all.
  logits = jnp.where(real[:, -1:], logits, session.logits)
  rows = jnp.arange(ids.shape[0])[:, None]
  unknown = session.used.shape[1]
  used = session.used.at[rows, jnp.where(real, ids, unknown)].set(
    True, mode="drop"
  )
  position = session.position + jnp.sum(real, axis=1, dtype=jnp.int32)
  return session_lib.Session(state, logits, position, used)
