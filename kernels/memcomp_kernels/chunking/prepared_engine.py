"""Engines of chunk forms for memories with affine tiles, run by kernels.

An update that is defined per chunk also needs the start of a chunk that
continues across calls. A chunk from an earlier call is one tile whose start is
known, so that tile is evaluated against its start before the kernel runs. The
kernel leaves out the write of the last chunk. What it ends with then is the
start of that chunk, and the write is added afterwards.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import affine, contract
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib


class _Prepared(NamedTuple):
  """What a call needs besides its memories.

  Attributes:
    tile: all tiles, `[tiles, batch, heads, ...]`.
    last: the last chunk's tile, `[batch, heads, ...]`, if the start of the last
      chunk is needed, else None. `tile` then has only the reads of that chunk.
  """

  tile: affine.Tile
  last: affine.Tile | None


def _prepare(form, layout, asks: bool, inputs, chunk_start) -> _Prepared:
  """Prepares tiles; `asks` says if the start of the last chunk is needed."""
  tile = form_lib.prepare(form, inputs)
  if not asks:
    return _Prepared(tile, None)
  tile = _from_start(layout, tile, chunk_start)
  last = _last(layout, tile)

  def elsewhere(x, value):
    own = jnp.arange(x.shape[0])[:, None] == last
    return jnp.where(own.reshape(*own.shape, *[1] * (x.ndim - 2)), value, x)

  held = tile._replace(
    key=elsewhere(tile.key, 0), total=elsewhere(tile.total, 1)
  )
  return _Prepared(held, jax.tree.map(lambda x: _at(x, last), tile))


def _from_start(layout, tile, chunk_start) -> affine.Tile:
  """Evaluates a first tile that continues a chunk against that chunk's start.

  The tile then has nothing left to erase or to read.
  """
  if layout.flags is None:
    return tile
  first = jax.tree.map(lambda x: x[0], tile)
  (start,) = chunk_start
  error, output = affine.meet(start, first)
  met = first._replace(
    write=error, output=output, query=jnp.zeros_like(first.query)
  )
  if first.erase is not None:
    met = met._replace(erase=jnp.zeros_like(first.erase))
  first = contract.batched_where(layout.flags.continues[0], met, first)
  return jax.tree.map(lambda x, new: x.at[0].set(new), tile, first)


def _last(layout, tile) -> jax.Array:
  """Returns the tile of each row's last token, `[batch]`; 0 if it has none."""
  num_tiles, batch = tile.total.shape[:2]
  if layout.flags is None:
    return jnp.full(batch, num_tiles - 1)
  index = jnp.arange(num_tiles)[:, None]
  return jnp.max(jnp.where(layout.flags.occupied, index, 0), axis=0)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
  """Takes one tile per row from `[tiles, batch, ...]`: `[batch, ...]`."""
  index = index.reshape(1, -1, *[1] * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=0)[0]


def _choose_start(layout, new: jax.Array, old: jax.Array) -> jax.Array:
  """Returns `new` in rows in which a chunk began, else `old`."""
  if layout.flags is None:
    return new
  began = layout.flags.occupied & ~layout.flags.continues
  return contract.batched_where(jnp.any(began, axis=0), new, old)


def _asks(by_chunk: bool, layout) -> bool:
  """Whether chunks may continue across the ends of the call."""
  unfinished = layout.time % layout.chunk != 0
  return by_chunk and (layout.flags is not None or unfinished)


def _write_last(memory: jax.Array, last: affine.Tile) -> jax.Array:
  return affine.run(memory, last)[0]


def _resets(layout) -> jax.Array | None:
  if layout.flags is None:
    return None
  return layout.flags.resets.T.astype(jnp.int32)


def _forward(kernel, by_chunk, form, layout, operands, save):
  """Runs the forward pass; see `form.Engine`."""
  inputs = layout_lib.lay(layout, operands.inputs)
  asks = _asks(by_chunk, layout)
  tile, last = _prepare(form, layout, asks, inputs, operands.chunk_start)
  (memory,), (reset,), (start,) = (
    operands.memories,
    operands.reset,
    operands.chunk_start,
  )
  found = kernel(tile, memory, resets=_resets(layout), reset=reset, save=save)
  outputs = affine.add_read(tile, found["read"])
  outputs = outputs.astype(_output_dtype(form, operands.memories, tile))
  outputs = layout_lib.unlay(layout, outputs)
  final = found["final"]
  if last is not None:
    start = _choose_start(layout, final, start)
    final = _write_last(final, last)
  result = form_lib.Result((final,), (start,), outputs, None)
  return result, (found["saved"],) if save else None


def _output_dtype(form, memories, tile) -> Any:
  """Returns the dtype of outputs that the form's own `run_tile` has."""

  def one(memories, tile):
    tile = jax.tree.map(lambda x: x[0], tile)
    call = form_lib.TileCall(
      memories, memories, tile, None, form.spec, form.tiling
    )
    return form.run_tile(call)[1]

  return jax.eval_shape(one, memories, tile).dtype


def _backward(kernel, by_chunk, form, layout, operands, saved, cotangents):
  """Runs the backward pass; see `form.Engine`."""
  inputs = layout_lib.lay(layout, operands.inputs)
  asks = _asks(by_chunk, layout)
  (tile, last), unprepare = jax.vjp(
    functools.partial(_prepare, form, layout, asks),
    inputs,
    operands.chunk_start,
  )
  wide = tile.write.dtype
  d_output = layout_lib.lay(layout, cotangents.outputs).astype(wide)
  d_read = d_output
  if tile.log_scale is not None:
    d_read = jnp.exp(tile.log_scale)[..., None] * d_output
  (d_final,), (d_start,) = cotangents.memories, cotangents.chunk_start
  (saved,), d_last = saved, None
  if last is not None:
    before = _at(saved, _last(layout, tile)).astype(d_final.dtype)
    d_final, d_last = jax.vjp(_write_last, before, last)[1](d_final)
    zeros = jnp.zeros_like(d_start)
    d_final += _choose_start(layout, d_start, zeros)
    d_start = _choose_start(layout, zeros, d_start)
  found = kernel(tile, saved, d_read, d_final, resets=_resets(layout))
  d_scale = None
  if tile.log_scale is not None:
    # d log mu = <mu dY, Q A> = <mu dY A^T, Q>.
    shared_by = tile.write.shape[2] // tile.query.shape[2]
    query = jnp.repeat(tile.query.astype(wide), shared_by, axis=2)
    d_scale = jnp.sum(found["d_query"] * query, axis=-1)

  def to_groups(x, like):
    x = x.reshape(*x.shape[:2], like.shape[2], -1, *x.shape[3:])
    return jnp.sum(x.astype(wide), axis=3).astype(like.dtype)

  d_tile = affine.Tile(
    write=found["d_write"],
    erase=found.get("d_erase"),
    key=to_groups(found["d_key"], tile.key),
    query=to_groups(found["d_query"], tile.query),
    log_scale=d_scale,
    output=d_output,
    total=found["d_total"],
  )
  d_inputs, (d_met,) = unprepare(_Prepared(d_tile, d_last))
  d_inputs = layout_lib.unlay(layout, d_inputs)
  d_reset = found.get("d_reset", jnp.zeros_like(d_final))
  return form_lib.Operands(
    (found["d_memory"],), (d_start + d_met,), (d_reset,), d_inputs
  )


def _as_saved(form, operands):
  """Converts memories to their saved form; see `form.Engine`."""
  (memory,) = operands.memories
  return (memory.astype(operands.inputs.query.dtype),)


def engines(
  forward: Callable[..., dict[str, jax.Array]],
  backward: Callable[..., dict[str, jax.Array]],
) -> tuple[form_lib.Engine, form_lib.Engine]:
  """Returns the engines of two kernels.

  The first is for updates whose definition does not depend on chunks, the
  second for updates that are defined per chunk.

  Args:
    forward: a function like `pallas_tpu.affine.prepared.forward`.
    backward: a function like `pallas_tpu.affine.prepared.backward`.
  """

  def engine(by_chunk):
    return form_lib.Engine(
      functools.partial(_forward, forward, by_chunk),
      functools.partial(_backward, backward, by_chunk),
      _as_saved,
    )

  return engine(False), engine(True)
