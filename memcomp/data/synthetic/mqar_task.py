"""MQAR as a training task: segments of rows, and the published curricula.

As in the benchmark, a segment is a set of examples of one length and number of
pairs, drawn once. Batches go through the segments in order, without shuffling,
and repeat each epoch. A batch never spans two segments: rows without questions
pad the last batch of each. `seed` determines the segment seeds as in the
authors' code (theirs is 123).
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import numpy as np

from memcomp.data import batch as batch_lib
from memcomp.data.synthetic import mqar
from memcomp.data.synthetic import task as task_lib

SEED = 123
"""Seed of the published data."""


class Segment(NamedTuple):
  """Examples of one kind: tokens per row, number of pairs, number of rows."""

  length: int
  pairs: int
  examples: int


class Curriculum(NamedTuple):
  """A published training: segments in `MqarConfig` syntax, batch size, epochs.

  Attributes:
    train: training segments.
    test: test segments.
    batch_size: rows per step.
    epochs: passes over `train`.
    random_filler: see `MqarConfig`.
  """

  train: str
  test: str
  batch_size: int
  epochs: int
  random_filler: bool = False

  def batches(self, split: str) -> int:
    """Number of batches in one pass over "train" or "test"."""
    segments = parse(self.train if split == "train" else self.test)
    return sum(-(-one.examples // self.batch_size) for one in segments)

  def steps(self) -> int:
    """Number of optimizer steps in all epochs."""
    return self.epochs * self.batches("train")


CURRICULA = {
  **{
    f"zoology{length}": Curriculum(
      f"{length}:{pairs}:100000", f"{length}:{pairs}:3000", batch, 64
    )
    for length, pairs, batch in (
      (64, 4, 512),
      (128, 8, 512),
      (256, 16, 256),
      (512, 64, 128),
    )
  },
  "based": Curriculum(
    "64:4:100000;128:8:20000;256:16:20000;256:32:20000;256:64:20000",
    "64:4:1000;64:8:1000;64:16:1000;128:32:1000;256:64:1000;512:128:1000"
    ";1024:256:1000",
    256,
    32,
    random_filler=True,
  ),
}
"""Zoology's figure 2 (arXiv 2312.04927), one training per length, and the
"original" configs of Based (arXiv 2402.18668). Both have vocabulary 8,192."""


@dataclasses.dataclass(kw_only=True, slots=True)
class MqarConfig(task_lib.TaskConfig):
  """Rows of multi-query associative recall.

  Attributes:
    vocab_size: number of token ids, more than the longest row.
    train: segments LENGTH:PAIRS:EXAMPLES, joined by ";", in training order.
    test: segments of the validation loss and of `eval.py`.
    mode: "exact" (zoology's stream, bit for bit, about 11 s for 100,000 rows of
      64) or "fast" (its distribution, about ten times as fast).
    power: a of the gaps' law i^(a - 1).
    random_filler: whether rows have random ids instead of 0 as filler. The
      authors' come from an unseeded generator, so no mode has their rows.
  """

  name: ClassVar[str] = "mqar"

  vocab_size: int = 8192
  train: str = CURRICULA["zoology64"].train
  test: str = CURRICULA["zoology64"].test
  mode: str = "exact"
  power: float = 0.01
  random_filler: bool = False

  @property
  def label(self) -> str:
    """Name of the results: "mqar" only if rows are exactly zoology's."""
    exact = self.mode == "exact" and not self.random_filler
    return "mqar" if exact else "mqar-fast"

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    if self.mode not in ("exact", "fast"):
      raise ValueError(f"mode={self.mode!r} is not one of: exact, fast")
    if not self.power > 0:
      raise ValueError(f"power={self.power} must be above 0")
    for name in ("train", "test"):
      self.checked(getattr(self, name), name)

  def checked(self, text: str, name: str) -> list[Segment]:
    """Parses segments, and checks that their rows can be drawn.

    Raises:
      ValueError: see `parse`; or a number is out of range.
    """
    found = parse(text, name)
    for segment in found:
      try:
        mqar.check(self.vocab_size, segment.length, segment.pairs)
        slots = mqar.slots_of(segment.length, segment.pairs)
        mqar.check_power(self.power, slots, by_logarithm=self.mode == "fast")
      except ValueError as error:
        numbers = ":".join(map(str, segment))
        raise ValueError(f"{name}={numbers}: {error}") from error
    return found

  def ids(self) -> int:
    """See `TaskConfig.ids`."""
    return self.vocab_size

  def segments(self, split: str) -> list[Segment]:
    """Returns the segments of a split; validation and test are the same."""
    name = "train" if split == "train" else "test"
    return parse(getattr(self, name), name)

  def lengths(self, split: str, length: int = 0) -> list[int]:
    """See `TaskConfig.lengths`."""
    del length
    return [segment.length for segment in self.segments(split)]

  def rows(
    self, split: str, *, seed: int, batch_size: int, length: int
  ) -> task_lib.Rows:
    """See `TaskConfig.rows`; there is no padding to `length`."""
    del length
    return _Rows(self, split, seed, batch_size)

  def seeds(self, split: str, seed: int) -> list[int]:
    """Returns the seed of each segment, drawn like the authors'."""
    rng = np.random.RandomState(seed)
    seeds = rng.randint(0, 2**31, len(self.segments("train")), dtype=np.int64)
    if split != "train":
      count = len(self.segments(split))
      seeds = rng.randint(2**31, 2**32, count, dtype=np.int64)
    return [int(x) for x in seeds]

  def test_seed(self, segment: Segment, seed: int) -> int:
    """Returns the seed of a segment to test on, alone or among others.

    It is that of the first such segment of `test`, or else depends on the
    segment and `seed` alone. Like all test seeds it is none of training's.
    """
    for own, found in zip(
      self.segments("test"), self.seeds("test", seed), strict=True
    ):
      if own == segment:
        return found
    rng = np.random.RandomState([seed, *segment])
    return int(rng.randint(2**31, 2**32, dtype=np.int64))

  def examples(
    self, split: str, number: int, seed: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Draws a segment of a split: see `draw`."""
    return self.draw(
      self.segments(split)[number], self.seeds(split, seed)[number]
    )

  def draw(
    self, segment: Segment, segment_seed: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Draws a whole segment: tokens and targets, int32 `[examples, length]`."""
    draw = mqar.exact if self.mode == "exact" else mqar.fast
    tokens, labels = draw(
      vocab_size=self.vocab_size,
      num_examples=segment.examples,
      length=segment.length,
      pairs=segment.pairs,
      power=self.power,
      seed=segment_seed,
    )
    if self.random_filler:
      filler = np.random.default_rng((segment_seed, 1)).integers(
        self.vocab_size, size=tokens.shape
      )
      tokens = np.where(tokens == 0, filler, tokens)
    targets = np.where(labels == mqar.IGNORED, -1, labels)
    return tokens.astype(np.int32), targets.astype(np.int32)


class _Rows:
  """Consecutive segments, each padded to whole batches."""

  def __init__(
    self, config: MqarConfig, split: str, seed: int, batch_size: int
  ):
    self._segments = config.segments(split)
    self._examples = functools.cache(
      lambda number: config.examples(split, number, seed)
    )
    padded = [
      -(-segment.examples // batch_size) * batch_size
      for segment in self._segments
    ]
    self._ends = np.cumsum(padded)
    self.epoch = int(self._ends[-1])

  def __getitem__(self, index: int) -> batch_lib.Batch:
    index %= self.epoch
    number = int(np.searchsorted(self._ends, index, side="right"))
    index -= int(self._ends[number - 1]) if number else 0
    segment = self._segments[number]
    if index >= segment.examples:
      return batch_lib.padding(segment.length)
    tokens, targets = self._examples(number)
    return task_lib.row(tokens[index], targets[index])


def parse(text: str, name: str = "segments") -> list[Segment]:
  """Parses "64:4:100000;128:8:20000".

  Raises:
    ValueError: it has another form; `name` is the field in the message.
  """
  found = []
  for part in text.split(";"):
    numbers = part.strip().split(":")
    # Nine digits exceed what fits in memory.
    if len(numbers) != 3 or not all(
      x.isdecimal() and len(x) < 10 and int(x) > 0 for x in numbers
    ):
      raise ValueError(
        f"{name}={part[:80]!r} is not LENGTH:PAIRS:EXAMPLES; write"
        " 64:4:100000;128:8:20000"
      )
    found.append(Segment(*map(int, numbers)))
  return found
