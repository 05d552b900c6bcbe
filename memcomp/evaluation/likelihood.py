"""Log-likelihoods of continuations, with shared prefill and few programs.

Texts are read in pieces of a few widths and batches of a fixed number of rows,
so XLA compiles one program per width. A context with several continuations, as
in multiple choice, is read once. Each continuation starts from a copy of the
state. Texts are never truncated.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp.evaluation import perplexity
from memcomp.inference import complete, prefill
from memcomp.inference import session as session_lib
from memcomp.models import abstract, decoder


class Request(NamedTuple):
  """A question: how likely is `continuation` after `context`?

  Attributes:
    context: ids `[time]`, at least one.
    continuation: ids `[time]`.
  """

  context: np.ndarray
  continuation: np.ndarray


class Answer(NamedTuple):
  """The answer to a request.

  Attributes:
    index: index of the request.
    log_likelihood: in nats; 0 for an empty continuation.
    greedy: whether each token is the most likely one.
  """

  index: int
  log_likelihood: float
  greedy: bool


def score(
  model: decoder.Decoder,
  requests: Sequence[Request],
  *,
  rows: int = 8,
  widths: Sequence[int] = complete.WIDTHS,
) -> Iterator[Answer]:
  """Scores continuations.

  Args:
    model: the language model.
    requests: in any order; those with equal contexts share one prefill.
    rows: number of parallel texts.
    widths: ascending lengths of pieces.

  Yields:
    One answer per request, longest texts first.
  """
  # Group by capacity, because room for a long continuation slows short ones.
  shared: dict[tuple[int, bytes], list[int]] = {}
  for index, (context, continuation) in enumerate(requests):
    room = session_lib.room_for(len(context) + len(continuation))
    key = room, np.asarray(context, np.int32).tobytes()
    shared.setdefault(key, []).append(index)
  groups = [
    (room, indices)
    for (room, _), indices in sorted(
      shared.items(), key=lambda item: (item[0][0], len(item[0][1]))
    )
  ][::-1]
  for batch in itertools.batched(groups, rows):
    session = session_lib.start(model, rows, batch[0][0])
    contexts = [requests[indices[0]].context for _, indices in batch]
    contexts += [contexts[0][:0]] * (rows - len(batch))
    session = prefill.read(model, session, contexts, widths=widths)
    # Batch continuations of similar lengths.
    each = sorted(
      ((i, row) for row, (_, indices) in enumerate(batch) for i in indices),
      key=lambda pair: -len(requests[pair[0]].continuation),
    )
    for part in itertools.batched(each, rows):
      spare = rows - len(part)
      parents = np.array([row for _, row in part] + [0] * spare, np.int32)
      texts = [requests[i].continuation for i, _ in part]
      texts += [texts[0][:0]] * spare
      sums, greedy = _score_texts(
        model, session_lib.pick(session, parents), texts, widths
      )
      for row, (index, _) in enumerate(part):
        yield Answer(index, -float(sums[row]), bool(greedy[row]))


def _score_texts(
  model: decoder.Decoder,
  session: session_lib.Session,
  texts: list[np.ndarray],
  widths: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the nats of each text, float64, and whether it is greedy."""
  graphdef, params = nnx.split(model)
  some = np.array([len(text) > 0 for text in texts])
  first = np.array([t[0] if len(t) else 0 for t in texts], np.int32)
  with session_lib.on_mesh_of(params):
    cost, likeliest = _first(session.logits, first)
    sums = np.where(some, np.asarray(cost, np.float64), 0.0)
    greedy = np.asarray(likeliest) | ~some
    state = session.state
    fed, wanted = [t[:-1] for t in texts], [t[1:] for t in texts]
    total = max(len(text) for text in fed)
    for start, stop in prefill.pieces(total, 0, widths):
      ids, real = prefill.columns(fed, total, start, stop)
      targets, _ = prefill.columns(wanted, total, start, stop)
      cost, likeliest, state = _score_piece(
        graphdef, params, state, ids, targets, real.astype(np.int32)
      )
      sums += np.where(real, np.asarray(cost), 0).sum(1, dtype=np.float64)
      greedy &= (np.asarray(likeliest) | ~real).all(1)
  return sums, greedy


@jax.jit
def _first(logits, targets):
  return _cost(logits, targets)


@functools.partial(jax.jit, static_argnums=0)
def _score_piece(graphdef, params, state, ids, targets, segment_ids):
  """Returns nats and greedy of `targets` `[rows, width]`, and the state."""
  model = abstract.merge(graphdef, params)
  hidden, state = model.hidden(ids, state=state, segment_ids=segment_ids)
  cost, likeliest = perplexity.by_position(model, _cost, hidden, targets)
  return cost, likeliest, state


def _cost(logits, targets):
  likeliest = jnp.argmax(logits, axis=-1) == targets
  return perplexity.nats(logits, targets), likeliest
