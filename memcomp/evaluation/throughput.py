"""Speed of inference by context length: prefill and decoding."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from memcomp import limits
from memcomp.inference import generate, prefill, sample
from memcomp.inference import session as session_lib
from memcomp.models import decoder

CONTEXTS = tuple(1 << n for n in range(10, 18))
"""1k to 128k tokens."""

GREEDY = sample.Settings(temperature=0.0)


def measure(
  model: decoder.Decoder,
  *,
  contexts: Sequence[int] = CONTEXTS,
  batch: int = 1,
  tokens: int = 64,
  rounds: int = 5,
  seed: int = 0,
  progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
  """Times prefill and decoding at several context lengths.

  It reads random texts once and keeps the state at every context. Then it runs
  rounds over all contexts, so that other load of the machine affects all of
  them equally. At each context it reads the last piece before it again, and
  generates `tokens` after it. Everything is compiled before.

  Args:
    model: the language model.
    contexts: context lengths in tokens, each >= 1.
    batch: number of parallel texts.
    tokens: tokens to generate at each context, in one call.
    rounds: number of rounds over all contexts, >= 1.
    seed: seed of the texts.
    progress: called after the prefill of each context and after each timing.

  Returns:
    A row for each context, shortest first: `context`; `state_bytes` of one
    text's state; the median over rounds of `read_tokens_per_second` (all texts)
    and `seconds_per_token` (one step of all texts), and their fastest as
    `..._fastest`; `peak_bytes` in use so far on the device (on a CPU: by this
    process).

  Raises:
    UserError: an argument is below 1.
  """
  for name, value in (
    ("contexts", min(contexts, default=0)),
    ("batch", batch),
    ("tokens", tokens),
    ("rounds", rounds),
  ):
    limits.check(name, value)
  contexts = sorted(set(contexts))
  vocab = model.embedding[...].shape[0]
  rng = np.random.default_rng(seed)
  texts = rng.integers(0, vocab, (batch, contexts[-1]), dtype=np.int32)
  session, at, turns, peaks = session_lib.start(model, batch), 0, [], []
  for context in contexts:
    piece = min(prefill.PIECE, context - at)
    session = prefill.read(model, session, texts[:, at : context - piece])
    turns.append(_Turn(model, session, texts[:, context - piece : context]))
    session = turns[-1].read()
    turns[-1].make(tokens)
    peaks.append(_peak_bytes())
    at = context
    progress()
  read: list[list[float]] = [[] for _ in contexts]
  made: list[list[float]] = [[] for _ in contexts]
  for _ in range(rounds):
    for i, turn in enumerate(turns):
      read[i].append(_seconds(turn.read) / turn.num_tokens)
      made[i].append(_seconds(lambda turn=turn: turn.make(tokens)) / tokens)
      progress()
  return [
    {
      "context": context,
      "state_bytes": session_lib.num_bytes(turn.after) // batch,
      "read_tokens_per_second": 1 / statistics.median(reads),
      "read_tokens_per_second_fastest": 1 / min(reads),
      "seconds_per_token": statistics.median(makes),
      "seconds_per_token_fastest": min(makes),
      "peak_bytes": peak,
    }
    for context, turn, reads, makes, peak in zip(
      contexts, turns, read, made, peaks, strict=True
    )
  ]


class _Turn:
  """The work that is timed at one context.

  Attributes:
    num_tokens: number of tokens that `read` reads.
    after: the session after `read`.
  """

  def __init__(self, model, before, texts):
    self._model, self._before, self._texts = model, before, list(texts)
    self.num_tokens = texts.size
    self.after = before

  def read(self) -> session_lib.Session:
    """Reads the piece before the context."""
    self.after = prefill.read(self._model, self._before, self._texts)
    return jax.block_until_ready(self.after)

  def make(self, tokens: int) -> None:
    """Generates tokens after the context, and discards them."""
    for _ in generate.generate(
      self._model,
      self.after,
      tokens=tokens,
      settings=GREEDY,
      piece_tokens=tokens,
    ):
      pass


def _seconds(function: Callable[[], Any]) -> float:
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


def _peak_bytes() -> int:
  stats = jax.local_devices()[0].memory_stats()
  if stats:
    return stats["peak_bytes_in_use"]
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak * (1 if sys.platform == "darwin" else 1024)
