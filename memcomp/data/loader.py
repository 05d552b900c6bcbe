"""Batches of rows in a fixed order, for one of several processes.

The global sequence of rows depends only on the config and the data. A process
reads the rows of each global batch that its devices hold. The state counts
global steps, so a run can resume with another number of processes.
"""

import hashlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from memcomp import errors
from memcomp.data import batch as batch_lib
from memcomp.data import packing, sources
from memcomp.data import store as store_lib
from memcomp.data.synthetic import task as task_lib

if TYPE_CHECKING:
  from memcomp import config as config_lib

# Number of rows. Not grain's infinity, sys.maxsize: in batches of one row its
# length overflows, because grain divides in floating point.
_FOR_EVER = 1 << 52


class Loader(Iterator[batch_lib.Batch]):
  """An iterator over batches whose position can be saved.

  Close it (or use `with`) to end its prefetch thread.

  Attributes:
    rows_per_epoch: rows in one pass over all data; 0 if it never ends.
  """

  def __init__(
    self,
    dataset: grain.IterDataset,
    *,
    identity: dict[str, Any],
    rows_per_epoch: int,
  ):
    self.rows_per_epoch = rows_per_epoch
    self._identity = identity
    self._step = 0
    # `finalize` empties the list, also at exit: an iterator that lives until
    # modules are torn down prints errors from its clean-up.
    self._iterators = [iter(dataset)]
    self._finalize = weakref.finalize(self, _close, self._iterators)

  def __next__(self) -> batch_lib.Batch:
    if not self._iterators:
      raise ValueError("the loader is closed")
    result = next(self._iterators[0])
    self._step += 1
    return result

  def state(self) -> dict[str, Any]:
    """Returns the position after the last batch, in a form for JSON."""
    return {"step": self._step, **self._identity}

  def restore(self, state: dict[str, Any]) -> None:
    """Continues from a saved `state`.

    Args:
      state: state of a loader of any number of processes.

    Raises:
      UserError: the data or the layout of rows differ.
    """
    for key, mine in self._identity.items():
      if state.get(key) != mine:
        name = "fingerprint of the data" if key == "data" else key
        raise errors.UserError(
          f"cannot continue the data where the checkpoint stopped: {name} was "
          f"{state.get(key)!r} and is now {mine!r}; set it back or start anew"
        )
    self._seek(int(state["step"]))

  def close(self) -> None:
    """Ends the prefetch thread; may be called twice."""
    self._finalize()

  def __enter__(self) -> "Loader":
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def _seek(self, step: int) -> None:
    if not self._iterators:
      raise ValueError("the loader is closed")
    grain.experimental.set_next_index(self._iterators[0], step)
    self._step = step


def _close(iterators: list[grain.DatasetIterator]) -> None:
  while iterators:
    iterators.pop().close()


def make_loader(
  data_config: "config_lib.DataConfig",
  store: sources.Split,
  *,
  batch_size: int,
  shuffle: bool,
  local_rows: np.ndarray | None = None,
) -> Loader:
  """Makes the batches of a store.

  Args:
    data_config: packing, stretch, sequence_length, seed and prefetch.
    store: documents or task rows from `sources.open_split`.
    batch_size: rows per step over all processes.
    shuffle: whether to repeat forever, with another order in each epoch; a
      mixture is drawn by weight. Otherwise one pass in stored order (a mixture
      is interleaved by weight, then the rest), with padding in the last batch.
      A task always has its own order.
    local_rows: integers in [0, batch_size), the rows of each batch that this
      process reads; None is all.

  Returns:
    An iterator over `Batch`es of `[len(local_rows), sequence_length]`.

  Raises:
    UserError: too little text, or bad settings.
  """
  sources.check(data_config)
  if batch_size < 1:
    raise errors.UserError(f"batch_size: must be at least 1, got {batch_size}")
  rows, rows_per_epoch = _rows(data_config, store, batch_size, shuffle)
  if local_rows is None:
    local_rows = np.arange(batch_size)
  local_batch = len(local_rows)

  def local_row(index: int) -> Any:
    step, row = divmod(index, local_batch)
    return rows[step * batch_size + int(local_rows[row])]

  steps = len(rows) // batch_size
  batches = grain.MapDataset.range(steps * local_batch)
  batches = batches.map(local_row).batch(local_batch)
  # No grain reader threads: rows are cheap, and one thread that prefetches
  # whole batches overlaps them with the step.
  dataset = grain.experimental.ThreadPrefetchIterDataset(
    batches.to_iter_dataset(
      grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    ),
    prefetch_buffer_size=data_config.prefetch,
  )
  identity = {
    "data": store.fingerprint,
    "packing": data_config.packing,
    "sequence_length": data_config.sequence_length,
    "batch_size": batch_size,
    "seed": data_config.seed,
    "shuffle": shuffle,
  }
  if data_config.stretch:  # older checkpoints lack it
    identity["stretch"] = data_config.stretch
  return Loader(dataset, identity=identity, rows_per_epoch=rows_per_epoch)


def _rows(
  data_config: "config_lib.DataConfig",
  store: sources.Split,
  batch_size: int,
  shuffle: bool,
) -> tuple[grain.MapDataset, int]:
  """Returns the global sequence of rows and the length of an epoch."""
  if isinstance(store, task_lib.Source):
    drawn = store.rows(batch_size)
    size = drawn.epoch if drawn.epoch and not shuffle else _FOR_EVER
    return grain.MapDataset.range(size).map(drawn.__getitem__), drawn.epoch
  stores, weights = [store], [1.0]
  if isinstance(store, store_lib.Mixture):
    stores, weights = list(store.stores), list(store.weights)
  if data_config.packing == "stream":
    rows = _Streams(data_config, stores, weights, batch_size, shuffle)
    size = _FOR_EVER if shuffle else len(rows)
    return grain.MapDataset.range(size).map(rows.__getitem__), len(rows)
  plans = [_plan(data_config, s) for s in stores]
  total = sum(map(len, plans))
  if not shuffle:
    ordered = _Ordered(plans, weights, batch_size, data_config.sequence_length)
    return grain.MapDataset.source(ordered), total
  datasets = [
    grain.MapDataset.source(plan)
    .shuffle(seed=_seed(data_config.seed, number))
    .repeat(_FOR_EVER // len(plan))
    for number, plan in enumerate(plans)
  ]
  if len(datasets) == 1:
    return datasets[0], total
  return grain.MapDataset.mix(datasets, weights=weights), total


def _plan(
  data_config: "config_lib.DataConfig", store: store_lib.TokenStore
) -> packing.Rows:
  length = data_config.sequence_length
  match data_config.packing:
    case "joined":
      return packing.Joined(store, length)
    case "concat":
      return packing.Concat(store, length)
    case "first_fit":
      return packing.FirstFit(store, length, seed=data_config.seed)
  raise ValueError(data_config.packing)


def _seed(seed: int, number: int) -> int:
  """Returns a seed for grain, in [0, 2**32).

  Grain adds the epoch to the seed. Without the hash, epoch 1 of seed 0 would
  have the order of epoch 0 of seed 1.
  """
  content = hashlib.sha256(f"shuffle {seed} {number}".encode()).digest()
  return int.from_bytes(content[:4], "big")


class _Ordered:
  """One pass over several plans, interleaved by weight, padded to batches.

  Any first part of it represents the mixture, and each row occurs once.
  """

  def __init__(
    self,
    plans: list[packing.Rows],
    weights: list[float],
    batch_size: int,
    sequence_length: int,
  ):
    self._plans = plans
    self._sequence_length = sequence_length
    part = np.repeat(np.arange(len(plans)), [len(plan) for plan in plans])
    row = np.concatenate([np.arange(len(plan)) for plan in plans])
    due = (row + 0.5) / np.array(weights)[part]
    order = np.argsort(due, kind="stable")
    self._part, self._row = part[order], row[order]
    self._length = -(-len(row) // batch_size) * batch_size

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> batch_lib.Batch:
    if index >= len(self._row):
      return batch_lib.padding(self._sequence_length)
    return self._plans[self._part[index]][int(self._row[index])]


class _Streams:
  """The streams of a batch, divided among the parts of a mixture."""

  def __init__(
    self,
    data_config: "config_lib.DataConfig",
    stores: list[store_lib.TokenStore],
    weights: list[float],
    batch_size: int,
    shuffle: bool,
  ):
    counts = share_out(batch_size, weights)
    if not counts.all():
      raise errors.UserError(
        f"batch_size: {batch_size} streams are too few for a mixture of "
        f"{len(stores)} sources with these weights; raise batch_size"
      )
    self._batch_size = batch_size
    self._repeat = shuffle
    self._sequence_length = data_config.sequence_length
    self._plans = []
    first_id = 1
    for number, (store, count) in enumerate(zip(stores, counts, strict=True)):
      plan = self._plan(data_config, store, int(count), number, first_id)
      first_id = plan.next_id
      self._plans.append(plan)
    self._part = np.repeat(np.arange(len(stores)), counts)
    self._stream = np.concatenate([np.arange(count) for count in counts])
    self._counts = counts

  def _plan(self, data_config, store, count, number, first_id):
    given = {
      "num_streams": count,
      "seed": _seed(data_config.seed, number),
      "first_id": first_id,
    }
    length = data_config.sequence_length
    if data_config.stretch and self._repeat:
      return packing.Stretches(
        store, length, windows=data_config.stretch, **given
      )
    return packing.Stream(store, length, shuffle=self._repeat, **given)

  def __len__(self) -> int:
    steps = max(plan.steps_per_epoch for plan in self._plans)
    return steps * self._batch_size

  def __getitem__(self, index: int) -> batch_lib.Batch:
    step, row = divmod(index, self._batch_size)
    part = self._part[row]
    plan = self._plans[part]
    if not self._repeat and step >= plan.steps_per_epoch:
      return batch_lib.padding(self._sequence_length)
    return plan[step * int(self._counts[part]) + int(self._stream[row])]


def share_out(total: int, weights: list[float]) -> np.ndarray:
  """Divides `total` items by weight, largest remainder first, int64."""
  exact = total * np.array(weights) / np.sum(weights)
  counts = np.floor(exact).astype(np.int64)
  missing = total - int(counts.sum())
  counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
  return counts
