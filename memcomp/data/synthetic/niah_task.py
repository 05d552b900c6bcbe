"""Rows of `niah` for training: a question and its answer, in bytes.

  tokens   A special magic number is hidden ... text is _ 1 2 3 4 5 6 7
  targets  . . .                                      _ 1 2 3 4 5 6 7 .

Rows are drawn like the benchmark's questions, each from a separate generator,
with the bundled words and essay. Only the answer has targets.
"""

import dataclasses
import random
from typing import ClassVar

import numpy as np

from memcomp.data import batch as batch_lib
from memcomp.data.synthetic import niah, stand_in
from memcomp.data.synthetic import task as task_lib

_ANSWER_BYTES = {"number": len(" 1234567."), "uuid": 36 + len(" .")}


_ROW_TRIES = 1000 * niah.TRIES
"""Draws of a row. A config whose row 0 fits within `niah.TRIES` needs far fewer
for any other row."""


@dataclasses.dataclass(kw_only=True, slots=True)
class NiahConfig(task_lib.TaskConfig):
  """Rows of needles in haystacks.

  Attributes:
    needle: a name in `niah.NEEDLES`.
    context: bytes of a question and `niah.ANSWER_TOKENS`, as in `eval.py`;
      haystacks are as large as fits.
  """

  name: ClassVar[str] = "niah"
  tokenizer: ClassVar[str] = "bytes"

  needle: str = "single_1"
  context: int = 1024

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    if self.needle not in niah.NEEDLES:
      raise ValueError(
        f"needle={self.needle!r} is not one of: {', '.join(niah.NEEDLES)}"
      )
    try:
      _Rows(self, "train", 0, 0).row(0, niah.TRIES)
    except niah.DoesNotFitError as error:
      raise ValueError(f"context={self.context}: {error}") from error

  def ids(self) -> int:
    """See `TaskConfig.ids`."""
    return 256

  def lengths(self, split: str, length: int = 0) -> list[int]:
    """See `TaskConfig.lengths`."""
    del split
    _, kind = niah.NEEDLES[self.needle]
    own = self.context - niah.ANSWER_TOKENS + _ANSWER_BYTES[kind] - 1
    return [max(own, length)]

  def rows(
    self, split: str, *, seed: int, batch_size: int, length: int
  ) -> task_lib.Rows:
    """See `TaskConfig.rows`; the rows never end."""
    del batch_size
    return _Rows(self, split, seed, length)


class _Rows:
  """Row i depends only on the seed, the split and i."""

  epoch = 0

  def __init__(self, config: NiahConfig, split: str, seed: int, length: int):
    self._config, self._entropy = config, f"{seed} {split}"
    (self._length,) = config.lengths(split, length)
    self._keys = niah.Keys(stand_in.ADJECTIVES, stand_in.NOUNS)
    haystack, self._kind = niah.NEEDLES[config.needle]
    self._haystack: niah.Haystack = niah.Noise()
    if haystack == "essay":
      self._haystack = niah.Essay(stand_in.ESSAY)

  def __getitem__(self, index: int) -> batch_lib.Batch:
    return self.row(index, _ROW_TRIES)

  def row(self, index: int, tries: float) -> batch_lib.Batch:
    """Returns a row; for `tries` see `niah.samples`."""
    (sample,) = niah.samples(
      kind=self._kind,
      keys=self._keys,
      haystack=self._haystack,
      max_tokens=self._config.context,
      count_tokens=lambda text: len(text.encode()),
      num_samples=1,
      seed=random.Random(f"{self._entropy} {index}").getrandbits(63),
      tries=tries,
    )
    prompt, answer = (
      np.frombuffer(text.encode(), np.uint8).astype(np.int32)
      for text in (sample.prompt, f" {sample.answer}.")
    )
    tokens = np.concatenate([prompt, answer[:-1]])
    targets = np.full_like(tokens, -1)
    targets[len(prompt) - 1 :] = answer
    pad = self._length - len(tokens)
    return task_lib.row(
      np.pad(tokens, (0, pad)), np.pad(targets, (0, pad), constant_values=-1)
    )
