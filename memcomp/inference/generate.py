"""Continues texts in a compiled loop on the device."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp import errors, limits
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.inference import prefill, sample, stop
from memcomp.inference import session as session_lib
from memcomp.models import abstract, decoder

PIECE = 16
"""Tokens per call of the compiled loop; they are shown after the call."""

_AHEAD = 4096
"""Tokens that growing memories get room for at once; not all, because a stop
string may end the text early."""


class Piece(NamedTuple):
  """The result of one call of the compiled loop.

  Attributes:
    ids: new ids of each row, int32 `[made]`; fewer if the row stopped.
    session: session after these tokens.
    stopped: bool `[batch]`, rows that have ended so far.
  """

  ids: list[np.ndarray]
  session: session_lib.Session
  stopped: np.ndarray


def generate(
  model: decoder.Decoder,
  session: session_lib.Session,
  *,
  tokens: int,
  settings: sample.Settings | Sequence[sample.Settings],
  stops: stop.Stops | None = None,
  vocab_size: int | None = None,
  node: int = 0,
  piece_tokens: int = PIECE,
) -> Iterator[Piece]:
  """Continues every text of a session until all have stopped.

  A draw depends only on its row's seed, text and position. Other rows and the
  split into calls do not matter. A stopped row keeps the state after the token
  that completes the stop string.

  Args:
    model: the language model.
    session: texts with at least one token each.
    tokens: maximum number of new tokens per row.
    settings: sampling settings, one for all rows or one each.
    stops: what ends a row.
    vocab_size: ids from here on are never drawn, because the model's vocabulary
      may exceed the tokenizer's. Never above that of `stops`; None is that
      of `stops`, else the model's.
    node: `stop.Text.node` of texts that go on, so that a stop string may have
      begun before.
    piece_tokens: tokens per call; does not change results.

  Raises:
    UserError: a text is empty, the model computes what is not finite, or a
      number is out of range.
  """
  limits.check("tokens", tokens, 0)
  limits.check("piece_tokens", piece_tokens)
  known = session.used.shape[1]
  if vocab_size is not None:
    limits.check("vocab_size", vocab_size)
    known = vocab_size
  if stops is not None:  # the tokenizer's ids
    known = min(known, stops.table.shape[1])
  position = np.asarray(session.position)
  if not position.all():
    raise errors.UserError(
      "the prompt is empty, and the model predicts from what stands before: "
      "give at least one character"
    )
  batch = len(position)
  knobs = sample.knobs(settings, batch)
  automaton = None if stops is None else (stops.table, stops.final)
  nodes = np.full(batch, node, np.int32)
  left = np.full(batch, tokens, np.int32)
  graphdef, params = nnx.split(model)
  made = room = 0
  while left.any():
    if made + piece_tokens > room:
      room = min(tokens, made + max(_AHEAD, piece_tokens))
      session = session_lib.grow(model, session, int(position.max()) + room)
    with session_lib.on_mesh_of(params):
      ids, session, nodes, left_ = make_tokens(
        graphdef,
        piece_tokens,
        params,
        session,
        nodes,
        left,
        knobs,
        known,
        automaton,
      )
    limits.check_computed(session.logits)
    ids, left = np.asarray(ids), np.asarray(left_)
    made += piece_tokens
    stopped = np.zeros(batch, bool)
    if stops is not None:
      stopped = stops.final[np.asarray(nodes)]
    yield Piece([row[row >= 0] for row in ids], session, stopped)


def text(
  model: decoder.Decoder,
  tokenizer: tokenizer_lib.Tokenizer,
  prompt: str,
  *,
  tokens: int,
  settings: sample.Settings,
  stop_strings: Sequence[str] = (),
) -> Iterator[str]:
  """Yields the continuation of a prompt as it is made.

  Characters whose bytes span several tokens appear whole, and invalid UTF-8
  appears as U+FFFD. A stop string or end token, and what follows it, does not
  appear.

  Raises:
    UserError: the prompt or a stop string is empty, or `tokens` is negative.
  """
  stops = stop.make(stop_strings, tokenizer)
  shown = stop.Text(tokenizer, stops)
  session = session_lib.start(model)
  session = prefill.read(model, session, [tokenizer.encode(prompt)])
  for piece in generate(
    model,
    session,
    tokens=tokens,
    settings=settings,
    stops=stops,
    vocab_size=tokenizer.vocab_size,
  ):
    for token in piece.ids[0]:
      if part := shown.push(int(token)):
        yield part
  if part := shown.finish():
    yield part


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_tokens(
  graphdef, size, params, session, node, left, knobs, known, automaton
):
  """Makes up to `size` tokens in each row, at most `left`.

  Returns:
    ids `[batch, size]`, -1 after a row's last; session, node and left.
  """
  model = abstract.merge(graphdef, params)
  batch, vocab = session.used.shape
  rows = jnp.arange(batch)

  def unfinished(carry):
    index, _, _, _, left = carry
    return (index < size) & jnp.any(left > 0)

  def body(carry):
    index, ids, session, node, left = carry
    goes_on = left > 0
    logits = jnp.where(jnp.arange(vocab) < known, session.logits, -jnp.inf)
    token = sample.draw(logits, session.position, session.used, knobs)
    logits, state = model.step(token, session.state)
    used = session.used.at[rows, token].set(True)
    new = session_lib.Session(state, logits, session.position + 1, used)
    if batch > 1:  # the loop ends when a single row stops
      new = session_lib.where(goes_on, new, session)
    left = jnp.where(goes_on, left - 1, left)
    if automaton is not None:
      table, final = automaton
      node = jnp.where(goes_on, jnp.asarray(table)[node, token], node)
      left = jnp.where(jnp.asarray(final)[node], 0, left)
    ids = ids.at[:, index].set(jnp.where(goes_on, token, -1))
    return index + 1, ids, new, node, left

  # A scan over stacked layers would copy all memories for each token.
  session = session._replace(state=session.state.by_layer())
  start = 0, jnp.full((batch, size), -1, jnp.int32), session, node, left
  _, ids, session, node, left = jax.lax.while_loop(unfinished, body, start)
  session = session._replace(state=session.state.stacked())
  return ids, session, node, left
