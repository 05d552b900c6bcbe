"""Speed of inference by context length: prefill and decoding."""

import functools
import operator
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from memcomp import limits
from memcomp.inference import complete, generate, prefill
from memcomp.inference import session as session_lib
from memcomp.models import decoder

CONTEXTS = tuple(1 << n for n in range(10, 18))
"""1k to 128k tokens."""

ROUNDS = 5
"""Timings of each context."""


def measure(
  model: decoder.Decoder,
  *,
  contexts: Sequence[int] = CONTEXTS,
  batch: int = 1,
  tokens: int = 64,
  rounds: int = ROUNDS,
  seed: int = 0,
  progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
  """Times prefill and decoding at several context lengths.

  It reads random texts once and keeps the state at every context. Then it runs
  rounds over all contexts, so that other load of the machine affects all of
  them equally. At each context it reads the last piece before it again, and
  generates one token and then `tokens` after it: the difference is what tokens
  cost without the call. Everything is compiled before, and growing memories
  have room for all tokens.

  Args:
    model: the language model.
    contexts: context lengths in tokens, each >= 1.
    batch: number of parallel texts.
    tokens: tokens to generate at each context, in one call, >= 2.
    rounds: number of rounds over all contexts, >= 1.
    seed: seed of the texts.
    progress: called after the prefill of each context and after each timing.

  Returns:
    A row for each context, shortest first: `context`; `state_bytes` of one
    text's state while it generates; `read_tokens_per_second` (all texts) and
    `seconds_per_token` (one step of all texts), from medians over rounds, and
    from the fastest as `..._fastest`; `seconds_per_call`, what a call costs
    besides its tokens; `peak_bytes` in use so far on the device (on a CPU: by
    this process).

  Raises:
    UserError: an argument is too small.
  """
  for name, value, least in (
    ("contexts", min(contexts, default=0), 1),
    ("batch", batch, 1),
    ("tokens", tokens, 2),
    ("rounds", rounds, 1),
  ):
    limits.check(name, value, least)
  contexts = sorted(set(contexts))
  vocab = model.embedding[...].shape[0]
  rng = np.random.default_rng(seed)
  texts = rng.integers(0, vocab, (batch, contexts[-1]), dtype=np.int32)
  session, at, turns = session_lib.start(model, batch), 0, []
  sizes, peaks = [], []
  for context in contexts:
    piece = min(prefill.PIECE, context - at)
    session = prefill.read(model, session, texts[:, at : context - piece])
    last = texts[:, context - piece : context]
    turns.append(_Turn(model, session, last, tokens))
    session = turns[-1].read()
    roomy = turns[-1].with_room()
    sizes.append(session_lib.num_bytes(roomy) // batch)
    turns[-1].make(roomy, tokens)
    del roomy  # else it would count at the next context's peak
    peaks.append(_peak_bytes())
    at = context
    progress()
  read: list[list[float]] = [[] for _ in contexts]
  ones: list[list[float]] = [[] for _ in contexts]
  made: list[list[float]] = [[] for _ in contexts]
  for _ in range(rounds):
    for i, turn in enumerate(turns):
      read[i].append(_seconds(turn.read) / turn.num_tokens)
      make = functools.partial(turn.make, turn.with_room())
      ones[i].append(_seconds(make, 1))
      made[i].append(_seconds(make, tokens))
      progress()
  rows = []
  for i, context in enumerate(contexts):
    less = map(operator.sub, made[i], ones[i])
    token = _per_token(statistics.median(less), made[i], tokens)
    least = _per_token(min(made[i]) - min(ones[i]), made[i], tokens)
    rows.append(
      {
        "context": context,
        "state_bytes": sizes[i],
        "read_tokens_per_second": 1 / statistics.median(read[i]),
        "read_tokens_per_second_fastest": 1 / min(read[i]),
        "seconds_per_token": token,
        "seconds_per_token_fastest": min(token, least),
        "seconds_per_call": statistics.median(ones[i]) - token,
        "peak_bytes": peaks[i],
      }
    )
  return rows


class _Turn:
  """The work that is timed at one context.

  Attributes:
    num_tokens: number of tokens that `read` reads.
    after: the session after `read`.
  """

  def __init__(self, model, before, texts, tokens):
    self._model, self._before, self._texts = model, before, list(texts)
    self._tokens = tokens
    self.num_tokens = texts.size
    self.after = before

  def read(self) -> session_lib.Session:
    """Reads the piece before the context."""
    self.after = prefill.read(self._model, self._before, self._texts)
    return jax.block_until_ready(self.after)

  def with_room(self) -> session_lib.Session:
    """Returns `after` with room for the tokens, so that no timing makes it."""
    needed = int(self.after.position[0]) + self._tokens
    grown = session_lib.grow(self._model, self.after, needed)
    return jax.block_until_ready(grown)

  def make(self, session: session_lib.Session, tokens: int) -> None:
    """Generates tokens after the context, and discards them.

    It uses the program for `self._tokens` tokens per call, also for fewer.
    """
    for _ in generate.generate(
      self._model,
      session,
      tokens=tokens,
      settings=complete.GREEDY,
      piece_tokens=self._tokens,
    ):
      pass


def _per_token(difference: float, made: list[float], tokens: int) -> float:
  """Returns the seconds per token.

  Args:
    difference: seconds for all tokens minus seconds for one token.
    made: seconds for all tokens, by round. If noise makes `difference` 0 or
      less, the result is the fastest round divided by `tokens`.
    tokens: number of tokens.
  """
  if difference > 0:
    return difference / (tokens - 1)
  return min(made) / tokens


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
  start = time.perf_counter()
  function(*arguments)
  return time.perf_counter() - start


def _peak_bytes() -> int:
  stats = jax.local_devices()[0].memory_stats()
  if stats:
    return stats["peak_bytes_in_use"]
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak * (1 if sys.platform == "darwin" else 1024)
