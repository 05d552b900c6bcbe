"""Compression of text without a neural network: order-k byte models, gzip, xz.

An order-k model predicts a byte c from the k bytes h before it, with
interpolation by Witten and Bell (IEEE Trans. Inf. Theory 37(4), 1991, method
C):

  P_k(c | h) = (n(h, c) + t(h) P_{k-1}(c | h')) / (n(h) + t(h))

n counts in the training text, t(h) is the number of different bytes after h,
and h' is h without its oldest byte. Below order 0 is the uniform distribution.
If h does not occur, P_k is P_{k-1}.
"""

import gzip
import lzma
from collections.abc import Callable, Iterator

import numpy as np

MAX_ORDER = 7
"""A context and its next byte fit a 64-bit code."""

UNIFORM_BITS = 8.0


def witten_bell(
  train: np.ndarray, text: np.ndarray, max_order: int
) -> Iterator[np.ndarray]:
  """Scores every byte of a text with models of increasing order.

  Args:
    train: uint8 `[train_bytes]`, the text to count.
    text: uint8 `[bytes]`, the text to predict; its first bytes have short
      contexts.
    max_order: maximum order, in [0, MAX_ORDER].

  Yields:
    float64 `[bytes]` for order 0, 1, ...: the probability of each byte.
  """
  if not 0 <= max_order <= MAX_ORDER:
    raise ValueError(f"max_order={max_order} must lie in [0, {MAX_ORDER}]")
  probability = np.full(len(text), 1 / 256)
  for order in range(max_order + 1):
    probability = probability.copy()
    # The first `order` bytes have no context of this length and stay unchanged.
    probability[order:] = _refine(train, text, order, probability[order:])
    yield probability


def bits_per_byte(
  train: np.ndarray,
  text: np.ndarray,
  max_order: int = MAX_ORDER,
  progress: Callable[[], object] = lambda: None,
) -> dict[int, float]:
  """Returns order -> bits per byte of `text` except its first byte.

  Language models do not predict a first token, so all models score equal bytes.
  """
  result = {}
  for order, p in enumerate(witten_bell(train, text, max_order)):
    result[order] = float(-np.log2(p[1:]).mean())
    progress()
  return result


def compressed_bits_per_byte(text: bytes) -> dict[str, float]:
  """Returns the bits per byte of `text` under "gzip -9" and "xz -9"."""
  return {
    "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
    "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
  }


def _refine(
  train: np.ndarray, text: np.ndarray, order: int, lower: np.ndarray
) -> np.ndarray:
  """Returns P_k of `text[order:]` from its P_{k-1}."""
  # The context is in the high bytes of a code. So one sort gives the runs of
  # equal (context, byte), and in them the runs of equal contexts.
  codes = np.sort(_codes(train, order + 1))
  if not len(codes) or not len(lower):
    return lower
  starts = _run_starts(codes)
  grams = codes[starts]
  counts = np.diff(starts, append=len(codes))
  context_starts = _run_starts(grams >> np.uint64(8))
  contexts = grams[context_starts] >> np.uint64(8)
  totals = np.add.reduceat(counts, context_starts)
  types = np.diff(context_starts, append=len(grams))

  # Search each different gram once and in order, which suits the caches.
  asked, inverse = np.unique(_codes(text, order + 1), return_inverse=True)
  count = _look_up(grams, counts, asked)
  context = asked >> np.uint64(8)
  total = _look_up(contexts, totals, context)
  kinds = _look_up(contexts, types, context)
  # For an unseen context (total = kinds = 0), use the lower order alone.
  share = np.where(total > 0, kinds / np.maximum(total + kinds, 1), 1.0)
  own = count / np.maximum(total + kinds, 1)
  return own[inverse] + share[inverse] * lower


def _codes(text: np.ndarray, length: int) -> np.ndarray:
  """Returns all runs of `length` bytes as numbers, first byte highest."""
  size = max(0, len(text) - length + 1)
  codes = np.zeros(size, np.uint64)
  for i in range(length):
    codes <<= np.uint64(8)
    codes |= text[i : i + size]
  return codes


def _run_starts(values: np.ndarray) -> np.ndarray:
  """Returns the starts of runs of equal values, int64."""
  changes = np.flatnonzero(values[1:] != values[:-1]) + 1
  return np.concatenate([np.zeros(1, np.int64), changes])


def _look_up(
  keys: np.ndarray, values: np.ndarray, asked: np.ndarray
) -> np.ndarray:
  """Returns the value of each key in `asked`, 0 for missing keys."""
  place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
  return np.where(keys[place] == asked, values[place], 0)
