"""Multi-query associative recall (zoology, arXiv 2312.04927).

A row has `pairs` key-value pairs, then asks for each key once:

  inputs   k1 v1 k2 v2 ...  0  k2  0  0  k1  0 ...
  labels    .  .  .  . ...  .  v2  .  .  v1  . ...

The answer is predicted at its key's question, and is not an input. Keys are in
[1, vocab / 2), values in [vocab / 2, vocab), without repetition in a row; 0 is
filler. Gaps follow a power law: most questions come early.

`exact` draws like the benchmark's authors, bit for bit, example by example.
`fast` has the same distribution with another random stream, in batches; its
results are called mqar-fast.
"""

import numpy as np

IGNORED = -100
"""Label of positions without a question."""


def exact(
  *,
  vocab_size: int,
  num_examples: int,
  length: int,
  pairs: int,
  power: float = 0.01,
  seed: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws examples bit-equal to zoology's `multiquery_ar` with filler 0.

  Args:
    vocab_size: number of token ids; more than `length`.
    num_examples: number of rows.
    length: tokens per row, even, at least 4 * pairs.
    pairs: number of key-value pairs, each asked for once.
    power: a of the gaps' law i^(a - 1); 1 is uniform.
    seed: seed of numpy's legacy generator, whose stream is frozen.

  Returns:
    Inputs and labels, int64 `[num_examples, length]`.

  Raises:
    ValueError: naming the argument that is out of range.
  """
  check(vocab_size, length, pairs)
  check_power(power, slots_of(length, pairs), by_logarithm=False)
  rng = np.random.RandomState(seed)
  keys, values = _ranges(vocab_size)
  # The original draws all keys, then all values, then all gaps.
  keys = _choices(rng, num_examples, keys, pairs)
  values = _choices(rng, num_examples, values, pairs)
  slots = slots_of(length, pairs)
  law = _law(power, slots)
  law = law / law.sum()
  gaps = _choices(rng, num_examples, np.arange(slots), pairs, law)
  return _rows(keys, values, gaps, length)


def fast(
  *,
  vocab_size: int,
  num_examples: int,
  length: int,
  pairs: int,
  power: float = 0.01,
  seed: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Draws from the distribution of `exact`, about ten times as fast.

  Arguments, result and errors are those of `exact`; the random stream differs.
  """
  check(vocab_size, length, pairs)
  check_power(power, slots_of(length, pairs), by_logarithm=True)
  rng = np.random.default_rng(seed)
  keys, values = _ranges(vocab_size)
  shape = num_examples, pairs
  keys = _distinct(rng, keys[0], keys[-1] + 1, shape)
  values = _distinct(rng, values[0], values[-1] + 1, shape)
  slots = slots_of(length, pairs)
  # The order of perturbed logits is sampling without replacement. Keep the
  # order: the first key's question is the most likely to be near.
  logits = (power - 1) * np.log(np.arange(1, slots + 1))
  perturbed = logits + rng.gumbel(size=(num_examples, slots))
  gaps = np.argsort(-perturbed, axis=1)[:, :pairs]
  return _rows(keys, values, gaps, length)


def check(vocab_size: int, length: int, pairs: int) -> None:
  """Raises ValueError naming the argument that is out of range."""
  if pairs < 1:
    raise ValueError(f"pairs={pairs} must be at least 1")
  if length % 2 or length < 4 * pairs:
    raise ValueError(
      f"length={length} must be even and at least 4 * pairs={4 * pairs}"
    )
  if vocab_size <= length:
    raise ValueError(f"vocab_size={vocab_size} must be over length={length}")


def slots_of(length: int, pairs: int) -> int:
  """Returns the number of places for a question in a row of `length` tokens."""
  return (length - 2 * pairs) // 2


def check_power(power: float, slots: int, *, by_logarithm: bool) -> None:
  """Checks that the law of the gaps can be computed.

  Args:
    power: see `exact`.
    slots: number of places for a question, >= 1.
    by_logarithm: whether the law's logarithm is computed, as `fast` does.

  Raises:
    ValueError: it overflows or underflows.
  """
  last = np.float64(slots)
  with np.errstate(all="ignore"):
    if not by_logarithm:
      possible = power * last ** (power - 1) > 0
      # Rows may be long: add the law up only where a bound of it overflows.
      if not np.isfinite(power * last**power):
        possible = np.isfinite(_law(power, slots).sum())
    else:
      possible = np.isfinite((power - 1) * np.log(last))
  if not possible:
    raise ValueError(
      f"power={power}: i^(power - 1) overflows or underflows over {slots}"
      " slots; give a power nearer to 1"
    )


def _law(power: float, slots: int) -> np.ndarray:
  # Floats, because powers of integers overflow silently.
  return power * np.arange(1.0, slots + 1) ** (power - 1)


def _ranges(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
  half = vocab_size // 2
  return np.arange(1, half), np.arange(half, vocab_size)


def _choices(rng, num_examples, choices, pairs, law=None):
  drawn = [
    rng.choice(choices, replace=False, p=law, size=pairs)
    for _ in range(num_examples)
  ]
  return np.stack(drawn)


def _distinct(rng, low: int, high: int, shape: tuple[int, int]) -> np.ndarray:
  """Draws integers in [low, high), distinct in each row."""
  drawn = rng.integers(low, high, shape)
  while True:
    order = np.argsort(drawn, axis=1, kind="stable")
    by_size = np.take_along_axis(drawn, order, axis=1)
    repeats = np.zeros(shape, bool)
    np.put_along_axis(
      repeats, order[:, 1:], by_size[:, 1:] == by_size[:, :-1], axis=1
    )
    if not repeats.any():
      return drawn
    # Redrawing treats all numbers alike, so all distinct rows stay equally
    # likely.
    drawn[repeats] = rng.integers(low, high, repeats.sum())


def _rows(keys, values, gaps, length):
  num_examples, pairs = keys.shape
  inputs = np.zeros((num_examples, length), np.int64)
  labels = np.full((num_examples, length), IGNORED, np.int64)
  inputs[:, 0 : 2 * pairs : 2] = keys
  inputs[:, 1 : 2 * pairs : 2] = values
  asked = 2 * pairs + 2 * gaps
  np.put_along_axis(inputs, asked, keys, axis=1)
  np.put_along_axis(labels, asked, values, axis=1)
  return inputs, labels
