"""Reads texts into sessions with the chunk form, piece by piece."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp import errors, limits
from memcomp import progress as progress_lib
from memcomp.inference import session as session_lib
from memcomp.models import abstract, decoder

PIECE = 1024
"""Tokens of a text per call, which bounds the memory in use."""

_LEAST = 8
"""Tokens of the shortest piece; lengths double from here, to compile few
programs."""


def read(
  model: decoder.Decoder,
  session: session_lib.Session,
  texts: Sequence[np.ndarray] | np.ndarray,
  *,
  piece_tokens: int = PIECE,
  widths: Sequence[int] = (),
) -> session_lib.Session:
  """Reads more text in every row; shows progress if it takes long.

  Rows are padded on the left. Padding does not change a memory, so each row is
  read as if it were alone.

  Args:
    model: the session's model.
    session: what the model has read so far.
    texts: ids `[time]` for each row, of any length. They are sliced piece by
      piece, so a memory-mapped array stays on disk. An empty text leaves its
      row unchanged.
    piece_tokens: tokens of each text per call; affects rounding only.
    widths: ascending piece lengths to use instead. The first piece of a text
      has the smallest width that holds it. This limits the number of compiled
      programs when texts have many lengths.

  Returns:
    The session after the last token of each text.

  Raises:
    UserError: the number of texts does not match the rows, the model lacks an
      id or computes what is not finite, or `piece_tokens` is below 1.
  """
  limits.check("piece_tokens", piece_tokens)
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
      # Room for the tokens of each text after its padding.
      needed = int(np.max(before + np.maximum(stop - total + lengths, 0)))
      if needed > room:
        session = session_lib.grow(model, session, needed)
        room = session_lib.room_for(needed)
      whole = real.all() and not widths
      segment_ids = None if whole else real.astype(np.int32)
      session = _read(graphdef, params, session, ids, segment_ids)
      # Otherwise all pieces and their buffers would be queued at once.
      session.position.block_until_ready()
      progress.advance(stop - max(start, 0))
  limits.check_computed(session.logits)
  return session


def pieces(
  total: int, size: int, widths: Sequence[int] = ()
) -> Iterator[tuple[int, int]]:
  """Splits `total` columns; the first piece may start before them, at < 0.

  Args:
    total: number of columns.
    size: columns per piece.
    widths: see `read`; the last one replaces `size`.

  Yields:
    [start, stop) of each piece.
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
  """Returns a range of columns of texts that are left-padded to `total`.

  Returns:
    Ids, int32 `[texts, stop - start]`, and a bool mask that is False for
    padding.

  Raises:
    UserError: ids are no whole numbers, or beyond int32.
  """
  ids = np.zeros((len(texts), stop - start), np.int32)
  real = np.zeros(ids.shape, bool)
  for row, text in enumerate(texts):
    shift = total - len(text)
    part = np.asarray(text[max(start - shift, 0) : max(stop - shift, 0)])
    if len(part):
      _check_fits(part)  # int32 would wrap it, or cut its fraction off
      ids[row, -len(part) :] = part
      real[row, -len(part) :] = True
  return ids, real


def _check_fits(ids: np.ndarray) -> None:
  """Raises UserError if int32 cannot hold some ids."""
  if ids.dtype.kind not in "iu":
    raise errors.UserError(
      f"ids are {ids.dtype}: give whole numbers, as a tokenizer gives them"
    )
  for one in (int(ids.min()), int(ids.max())):
    if not -(2**31) <= one < 2**31:
      raise errors.UserError(
        f"id {one} is none of any model's: use the tokenizer that it was"
        " trained with"
      )


@functools.partial(jax.jit, static_argnums=0)
def _read(graphdef, params, session, ids, segment_ids) -> session_lib.Session:
  model = abstract.merge(graphdef, params)
  hidden, state = model.hidden(
    ids, state=session.state, segment_ids=segment_ids
  )
  logits = model.logits(hidden[:, -1])
  real = jnp.ones(ids.shape, bool) if segment_ids is None else segment_ids != 0
  # A row whose last column is padding is all padding in this piece.
  logits = jnp.where(real[:, -1:], logits, session.logits)
  rows = jnp.arange(ids.shape[0])[:, None]
  unknown = session.used.shape[1]
  used = session.used.at[rows, jnp.where(real, ids, unknown)].set(
    True, mode="drop"
  )
  position = session.position + jnp.sum(real, axis=1, dtype=jnp.int32)
  return session_lib.Session(state, logits, position, used)
