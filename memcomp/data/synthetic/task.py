"""The interface of synthetic tasks to the trainer: rows drawn from seeds.

`DataConfig.task` holds the config of a task; `Source` replaces a store of text.
Rows have targets at questions, and -1 elsewhere.
"""

import abc
import dataclasses
import json
from typing import ClassVar, Protocol

import numpy as np

from memcomp.data import batch as batch_lib
from memcomp.data import store as store_lib

SPLITS = ("train", "validation", "test")


class Rows(Protocol):
  """Random access to rows; all rows of a batch have the same length.

  Attributes:
    epoch: number of rows after which they repeat; 0 if they never do.
  """

  epoch: int

  def __getitem__(self, index: int) -> batch_lib.Batch: ...


@dataclasses.dataclass(kw_only=True, slots=True)
class TaskConfig(abc.ABC):
  """The config of a task; subclasses add their fields.

  Attributes:
    name: name of the task.
    tokenizer: tokenizer of its ids, see `DataConfig.tokenizer`.
  """

  name: ClassVar[str]
  tokenizer: ClassVar[str] = "none"

  @abc.abstractmethod
  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""

  @abc.abstractmethod
  def ids(self) -> int:
    """Number of token ids; all ids of its rows are in [0, ids)."""

  @abc.abstractmethod
  def lengths(self, split: str, length: int = 0) -> list[int]:
    """Row lengths of a split in tokens, in order; for `length` see `rows`."""

  @abc.abstractmethod
  def rows(
    self, split: str, *, seed: int, batch_size: int, length: int
  ) -> Rows:
    """Returns the rows of a split, equal for equal arguments.

    Args:
      split: one of `SPLITS`; splits share rows only by chance.
      seed: seed of the draws, >= 0.
      batch_size: rows per batch; batch i starts at row i * batch_size.
      length: `DataConfig.sequence_length`; some tasks pad rows to it.
    """


class Source:
  """One split of a task, instead of a `store.TokenStore`.

  Attributes:
    task: the task.
    name: name for messages.
    fingerprint: 16 hex digits; equal for sources of equal rows.
  """

  def __init__(self, task: TaskConfig, split: str, *, seed: int, length: int):
    self.name = f"{task.name} ({split})"
    self.fingerprint = digest(task, split=split, seed=seed, length=length)
    self.task = task
    self._split, self._seed, self._length = split, seed, length

  def rows(self, batch_size: int) -> Rows:
    """Returns its rows, see `TaskConfig.rows`."""
    return self.task.rows(
      self._split,
      seed=self._seed,
      batch_size=batch_size,
      length=self._length,
    )


def digest(task: TaskConfig, **more: str | int) -> str:
  """Returns 16 hex digits that are equal for equal tasks."""
  fields = {"task": task.name, **dataclasses.asdict(task), **more}
  return store_lib.digest(json.dumps(fields, sort_keys=True))


def row(tokens: np.ndarray, targets: np.ndarray) -> batch_lib.Batch:
  """Returns a row of one segment from int `[time]` arrays."""
  return batch_lib.Batch(
    tokens=tokens.astype(np.int32),
    targets=targets.astype(np.int32),
    segment_ids=np.ones(len(tokens), np.int32),
    positions=np.arange(len(tokens), dtype=np.int32),
  )
