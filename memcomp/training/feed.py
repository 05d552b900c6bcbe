"""Moves batches from the loader to the mesh."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp import config as config_lib
from memcomp import sharding
from memcomp.data import batch as batch_lib
from memcomp.data import loader as loader_lib
from memcomp.data import sources


def abstract_batch(
  config: config_lib.Config, mesh: jax.sharding.Mesh
) -> batch_lib.Batch:
  """Returns a training batch of `Feed` as `ShapeDtypeStruct`s."""
  shape = config.training.batch_size, config.data.sequence_length
  tokens: Any = jax.ShapeDtypeStruct(
    shape, jnp.int32, sharding=sharding.batch_sharding(mesh)
  )
  return _without_ids(config, batch_lib.Batch(*[tokens] * 4))


def _without_ids(
  config: config_lib.Config, batch: batch_lib.Batch
) -> batch_lib.Batch:
  """Drops ids if rows have one segment, which enables a faster path."""
  if config.data.packing != "joined":
    return batch
  absent: Any = None
  return batch._replace(segment_ids=absent, positions=absent)


class Feed:
  """An iterator over (batch on the mesh, position of the loader after it).

  Use it in `with`, because the loader prefetches in a thread. The position
  belongs to the batch: a checkpoint after its step continues with the next.

  Attributes:
    store: the data.
  """

  def __init__(
    self,
    config: config_lib.Config,
    store: sources.Split,
    mesh: jax.sharding.Mesh,
    *,
    rows: int,
    shuffle: bool,
  ):
    """Opens a loader.

    Args:
      config: config of the run.
      store: the tokens, or the rows of a task.
      mesh: mesh for the batches.
      rows: rows per batch, over all processes.
      shuffle: whether to repeat forever in random order; else one pass in
        order.
    """
    self._loader = loader_lib.make_loader(
      config.data,
      store,
      batch_size=rows,
      shuffle=shuffle,
      local_rows=sharding.rows_of_process(mesh, rows),
    )
    self.store = store
    self._config = config
    self._sharding = sharding.batch_sharding(mesh)
    self._mesh = mesh

  def place(self) -> dict[str, Any]:
    """Returns the position of the loader after the last batch."""
    return self._loader.state()

  def restore(self, place: dict[str, Any]) -> None:
    """Continues after the batch that came with `place`."""
    self._loader.restore(place)

  def __iter__(self) -> "Feed":
    return self

  def __next__(self) -> tuple[batch_lib.Batch, dict[str, Any]]:
    batch: Any = next(self._loader)
    place = self.place()
    # Rows of a task may be shorter than `sequence_length`.
    time = sharding.time_of_process(self._mesh, batch.tokens.shape[1])
    batch = _without_ids(self._config, batch)
    on_mesh = jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(
        self._sharding, x[:, time]
      ),
      batch,
    )
    return on_mesh, place

  def __enter__(self) -> "Feed":
    return self

  def __exit__(self, *unused) -> None:
    self._loader.close()
