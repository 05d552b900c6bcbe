"""Recall over a gap (Tensor Cache, arXiv 2605.22884, synthetic recall).

A row stores pairs, fills the window with other tokens, and asks:

  tokens   BOS  [STORE k v  f f f ... f  QUERY k ANS v SEP PAD]  [STORE ...
  targets   .      .   . .  . . .     .    .   .  v  .  .   .       .

The paper does not give a layout. This one matches the token counts of its state
sizes: an episode has 3 tokens per pair, the gap, and 6. A row of `episodes`
episodes has 1 + episodes * (gap + 3 pairs + 6) tokens: 199 at gap 24. Keys of
one episode differ. Values, fillers and the key of the question are uniform, and
episodes are independent. Chance is 1 / `symbols`.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from memcomp.data import batch as batch_lib
from memcomp.data.synthetic import task as task_lib

BOS, PAD, SEP, STORE, QUERY, ANS = range(6)
FIRST_SYMBOL = 6
"""The first key; values follow the keys, and fillers follow the values."""


@dataclasses.dataclass(kw_only=True, slots=True)
class RecallConfig(task_lib.TaskConfig):
  """Rows of recall over a gap.

  Attributes:
    gap: number of fillers between pairs and question, >= 0.
    episodes: episodes per row, >= 1.
    pairs: pairs per episode, in [1, symbols]; one is asked for.
    symbols: number of keys, of values, and of fillers, >= 2.
  """

  name: ClassVar[str] = "recall"

  gap: int = 24
  episodes: int = 6
  pairs: int = 1
  symbols: int = 16

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    for field, least in (("gap", 0), ("episodes", 1), ("symbols", 2)):
      if getattr(self, field) < least:
        raise ValueError(
          f"{field}={getattr(self, field)} must be at least {least}"
        )
    if not 1 <= self.pairs <= self.symbols:
      raise ValueError(
        f"pairs={self.pairs} must be in [1, symbols={self.symbols}]"
      )

  def ids(self) -> int:
    """See `TaskConfig.ids`."""
    return FIRST_SYMBOL + 3 * self.symbols

  def tokens(self) -> int:
    """Tokens per row before padding."""
    return 1 + self.episodes * (self.gap + 3 * self.pairs + 6)

  def lengths(self, split: str, length: int = 0) -> list[int]:
    """See `TaskConfig.lengths`."""
    del split
    return [max(self.tokens(), length)]

  def rows(
    self, split: str, *, seed: int, batch_size: int, length: int
  ) -> task_lib.Rows:
    """See `TaskConfig.rows`; the rows never end."""
    del batch_size
    return _Rows(self, task_lib.SPLITS.index(split), seed, length)


class _Rows:
  """Row i depends only on the seed, the split and i."""

  epoch = 0

  def __init__(self, config: RecallConfig, split: int, seed: int, length: int):
    self._config = config
    self._entropy = seed, split
    self._length = length

  def __getitem__(self, index: int) -> batch_lib.Batch:
    rng = np.random.default_rng((*self._entropy, index))
    tokens, targets = draw(self._config, rng)
    pad = max(0, self._length - len(tokens))
    return task_lib.row(
      np.pad(tokens, (0, pad), constant_values=PAD),
      np.pad(targets, (0, pad), constant_values=-1),
    )


def draw(
  config: RecallConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
  """Draws one row: tokens and targets, int64 `[config.tokens()]`."""
  count, pairs, symbols = config.episodes, config.pairs, config.symbols
  first_value, first_filler = FIRST_SYMBOL + symbols, FIRST_SYMBOL + 2 * symbols
  keys = rng.random((count, symbols)).argsort(axis=1)[:, :pairs] + FIRST_SYMBOL
  values = rng.integers(symbols, size=(count, pairs)) + first_value
  fillers = rng.integers(symbols, size=(count, config.gap)) + first_filler
  asked = rng.integers(pairs, size=count)
  every = np.arange(count)
  key, value = keys[every, asked], values[every, asked]

  def column(token):
    return np.full((count, 1), token)

  told = np.stack([np.full_like(keys, STORE), keys, values], axis=2)
  tokens = np.concatenate(
    [
      told.reshape(count, -1),
      fillers,
      column(QUERY),
      key[:, None],
      column(ANS),
      value[:, None],
      column(SEP),
      column(PAD),
    ],
    axis=1,
  )
  targets = np.full_like(tokens, -1)
  targets[:, 3 * pairs + config.gap + 2] = value
  return (
    np.concatenate([[BOS], tokens.ravel()]),
    np.concatenate([[-1], targets.ravel()]),
  )
