"""Bits per byte and perplexity, by position, with the memory's state.

It computes two figures of the same text. `whole_text` is the usual one: every
token, in windows of the trained length with fresh states. `streamed` reads a
few long spans in such windows, carries the state to many times the trained
length, and reports by position. It also scores the same tokens with a fresh
state per window, because the difficulty of text varies.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memcomp import progress as progress_lib
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.evaluation import text as text_lib
from memcomp.models import abstract, decoder

# Tokens per call in `whole_text`, and floats of logits at the same time.
_CALL_TOKENS = 1 << 13
_LOGITS = 1 << 25

Score = Callable[[Any, np.ndarray, int], tuple[np.ndarray, Any]]
"""(state or None, tokens `[rows, window + 1]`, length) -> (nats `[rows,
window]` of all but the first token, state). None is a fresh state, with room
for `length` tokens in growing memories."""


def make_score(model: decoder.Decoder) -> Score:
  """Returns the jitted scoring function of one window."""
  graphdef, params = nnx.split(model)

  def score(state, tokens, length):
    if state is None:
      state = _fresh(graphdef, params, tokens.shape[0], length)
    nats, state = _score(graphdef, _LOGITS, params, state, tokens)
    return np.asarray(nats), state

  return score


def whole_text(
  score: Score,
  text: text_lib.Stream,
  tokenizer: tokenizer_lib.Tokenizer,
  window: int,
) -> dict[str, Any]:
  """Scores every token except the first, with a fresh state every `window`.

  Of conversations, it scores the answers, and each conversation starts fresh.

  Returns:
    `window`, and the figures of `Sums.summary`.
  """
  windows = text.windows(window)
  count = len(windows)
  rows = min(max(1, _CALL_TOKENS // window), count)
  total = Totals()
  progress = progress_lib.Progress("scoring all windows", count)
  for first in range(0, count, rows):
    # Zeros pad the last rows; causality keeps them from affecting earlier
    # tokens.
    tokens = np.zeros((rows, window + 1), np.int32)
    sizes = np.zeros(tokens.shape)
    scored = np.zeros((rows, window), bool)
    for row, (start, stop) in enumerate(windows[first : first + rows]):
      span, of_span = text.read_sized(tokenizer, start, stop)
      tokens[row, : len(span)] = span
      sizes[row, : len(span)] = of_span
      scored[row, : len(span) - 1] = text.scored(start + 1, stop)
    nats, _ = score(None, tokens, window)
    total.add(nats[scored], sizes[:, 1:][scored])
    progress.advance(min(rows, count - first))
  return {"window": window, **total.summary()}


def stream(
  score: Score, tokens: np.ndarray, window: int, *, carry: bool = True
) -> np.ndarray:
  """Scores long rows window by window.

  Args:
    score: function from `make_score`.
    tokens: int32 `[rows, positions + 1]`.
    window: tokens per call.
    carry: whether to carry the state; otherwise each window starts fresh.

  Returns:
    Nats of every token except the first, float32 `[rows, positions]`.
  """
  positions = tokens.shape[1] - 1
  tokens = np.pad(tokens, ((0, 0), (0, -positions % window)))
  starts = range(0, positions, window)
  what = "with the state" if carry else "without it"
  progress = progress_lib.Progress(f"streaming {what}", len(starts))
  state, parts = None, []
  for start in starts:
    span = tokens[:, start : start + window + 1]
    nats, new = score(state, span, len(starts) * window if carry else window)
    state = new if carry else None
    parts.append(nats)
    progress.advance()
  return np.concatenate(parts, axis=1)[:, :positions]


def streamed(
  score: Score,
  text: text_lib.Stream,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  window: int,
  lengths: int,
  rows: int,
) -> dict[str, Any]:
  """Scores `rows` spans of `lengths * window` tokens; reports by position.

  Spans start at even distances in the text. If the text is shorter than a span,
  they are cut to its length. Spans do not overlap, so a short text has fewer of
  them: errors are over rows, and equal rows would make them small.

  Returns:
    `window`, `lengths`, `rows` (spans scored), `positions`, `starts` (tokens),
    the figures of `Sums.summary` over all positions, and `buckets`: the same
    from position `first` to `last`, with `std_over_rows` of the bits per byte;
    `fresh_bits_per_byte` of the same tokens with a fresh state every window;
    and `gain_error`, the standard error over rows of what the carried state
    saves, in bits per byte. The first and the last are None for one row.
  """
  positions = min(lengths * window, text.num_tokens - 1)
  rows = min(rows, (text.num_tokens - 1) // positions)
  starts = span_starts(text.num_tokens, positions + 1, rows)
  spans = [text.read_sized(tokenizer, s, s + positions + 1) for s in starts]
  tokens = np.stack([span for span, _ in spans])
  num_bytes = np.stack([sizes[1:] for _, sizes in spans])
  nats = stream(score, tokens, window)
  fresh = stream(score, tokens, window, carry=False)
  overall = Totals()
  overall.add(nats, num_bytes)
  buckets = []
  for first, stop in bucket_ranges(window, positions):
    part = np.s_[:, first:stop]
    sums, fresh_sums = Totals(), Totals()
    sums.add(nats[part], num_bytes[part])
    fresh_sums.add(fresh[part], num_bytes[part])
    buckets.append(
      {
        "first": first,
        "last": stop - 1,
        **sums.summary(),
        "std_over_rows": _row_std(nats[part], num_bytes[part]),
        "fresh_bits_per_byte": fresh_sums.summary()["bits_per_byte"],
        # Rows differ far more than what the state saves in each of them.
        "gain_error": _row_error(fresh[part] - nats[part], num_bytes[part]),
      }
    )
  return {
    "window": window,
    "lengths": lengths,
    "rows": rows,
    "positions": positions,
    "starts": starts,
    **overall.summary(),
    "buckets": buckets,
  }


def span_starts(num_tokens: int, span: int, rows: int) -> list[int]:
  """Returns the starts of `rows` spans, evenly over all possible starts."""
  last = num_tokens - span
  return [round(last * row / max(rows - 1, 1)) for row in range(rows)]


def bucket_ranges(window: int, positions: int) -> list[tuple[int, int]]:
  """Returns doubling buckets [first, stop): 0-255, 256-511, 512-1023, ...

  For windows below 256, the first bucket is the largest power of two that fits.
  """
  edge = 1 << (min(window, 256).bit_length() - 1)
  edges = [0]
  while edge < positions:
    edges.append(edge)
    edge *= 2
  return list(zip(edges, [*edges[1:], positions], strict=True))


class Totals:
  """Sums over scored tokens, in float64."""

  def __init__(self):
    self.nats, self.tokens, self.bytes = 0.0, 0, 0.0

  def add(self, nats: np.ndarray, num_bytes: np.ndarray) -> None:
    """Adds tokens with costs `nats` and sizes `num_bytes`."""
    self.nats += float(nats.sum(dtype=np.float64))
    self.tokens += nats.size
    self.bytes += float(num_bytes.sum(dtype=np.float64))

  def summary(self) -> dict[str, Any]:
    """Returns `tokens`, `bytes`, `nats`, `bits_per_byte`, `perplexity`.

    Perplexity is per token. Figures that are not finite, or of no text, are
    None.
    """
    bits = tokenizer_lib.bits_per_byte(self.nats, self.bytes)
    # exp(700) is close to the largest float64.
    per_token = self.nats / self.tokens if self.tokens else math.inf
    return {
      "tokens": self.tokens,
      "bytes": round(self.bytes),
      "nats": finite(self.nats),
      "bits_per_byte": None if bits is None else finite(bits),
      "perplexity": math.exp(per_token) if per_token < 700 else None,
    }


def finite(x: float) -> float | None:
  """Returns `x`, or None if JSON cannot represent it."""
  return x if math.isfinite(x) else None


def _row_std(nats: np.ndarray, num_bytes: np.ndarray) -> float | None:
  size = num_bytes.sum(1)
  if len(nats) < 2 or not size.all():
    return None
  bits = nats.sum(1, dtype=np.float64) / size
  return finite(float(bits.std(ddof=1)) / math.log(2))


def _row_error(nats: np.ndarray, num_bytes: np.ndarray) -> float | None:
  std = _row_std(nats, num_bytes)
  return None if std is None else std / math.sqrt(len(nats))


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _fresh(graphdef, params, rows, length):
  return abstract.merge(graphdef, params).init_state(rows, length)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(graphdef, max_logits, params, state, tokens):
  model = abstract.merge(graphdef, params)
  hidden, state = model.hidden(tokens[:, :-1], state=state)
  return by_position(model, nats, hidden, tokens[:, 1:], max_logits), state


def nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns -log p of targets `[rows]` for logits float32 `[rows, vocab]`."""
  chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
  return jax.nn.logsumexp(logits, axis=-1) - chosen


def by_position(
  model: decoder.Decoder,
  function: Callable[[jax.Array, jax.Array], Any],
  hidden: jax.Array,
  targets: jax.Array,
  max_logits: int = _LOGITS,
) -> Any:
  """Maps a function of logits over positions, a few at a time.

  With a large vocabulary, the logits of all positions would fill the memory.

  Args:
    model: computes logits from hidden features.
    function: maps logits `[rows, vocab]` and targets `[rows]` to arrays of
      rows.
    hidden: `[rows, positions, features]`.
    targets: int `[rows, positions]`.
    max_logits: maximum floats of logits at the same time, but at least one
      position's.

  Returns:
    The results of `function`, `[rows, positions]`.
  """
  vocab = model.embedding[...].shape[0]
  rows, positions = targets.shape
  batch = max(1, max_logits // (vocab * rows))
  by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (hidden, targets))

  def one(x):
    return function(model.logits(x[0]), x[1])

  if batch >= positions:
    result = jax.vmap(one)(by_time)
  else:
    result = jax.lax.map(one, by_time, batch_size=batch)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), result)
