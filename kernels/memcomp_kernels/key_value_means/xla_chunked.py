"""Key-Value Means in chunk form, as matrix products in plain JAX.

A scan runs over tiles that hold one chunk of a sequence each (`tile.py` has
their algebra). Chunks belong to sequences and are not aligned to the call. A
state may arrive in the middle of a chunk. A packed segment begins a chunk at
its first token, or continues the chunk that its reset state is inside of. So
tokens are gathered into tiles by index.

The time depends on the rows that are live, and not on the state's capacity. The
scan is cut into a few stages, and each carries a slice of the state that is
enough for the live rows of its tiles. Shapes are static, so this needs
`max_position`, a static bound of the sequences' positions.

The gradient recomputes each tile from the state before it. Only that state and
the choice of rows are stored.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, derivative, dispatch
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.key_value_means import reference, rows, tile

_ROWS = ("keys", "values", "radii")

_SHORTEST_STAGE = 4
"""Minimum tiles per stage, because each stage is compiled separately."""

PIECE = 32
"""Tokens that are laid into tiles at a time if a row has very many segments.

Memory grows with the square of this number.
"""


class Stage(NamedTuple):
  """Tiles `start` to `stop`, which use the first `rows` of the memory."""

  rows: int
  start: int
  stop: int


def stages(
  spec: reference.Spec,
  *,
  capacity: int,
  max_position: int | None,
  time: int,
  num_tiles: int,
) -> list[Stage]:
  """Cuts the tiles of a call into stages where the live rows have doubled.

  Args:
    spec: the memory's options.
    capacity: rows of the state.
    max_position: an upper bound of the tokens that a segment has seen before
      the call, None if unknown.
    time: tokens per row.
    num_tiles: tiles per row.
  """
  if max_position is None:
    return [Stage(capacity, 0, num_tiles)]
  # In tile i, every segment is at most i chunks after the call's first chunk.
  first, last = (
    max_position // spec.chunk_size,
    (max_position + time - 1) // spec.chunk_size,
  )
  live = spec.live_rows(last)
  found: list[Stage] = []
  for i in range(num_tiles):
    bucket = spec.chunk_size
    while bucket < live[min(first + i, last)]:
      bucket *= 2
    bucket = min(bucket, capacity)
    if found and (
      found[-1].rows == bucket
      or found[-1].stop - found[-1].start < _SHORTEST_STAGE
    ):
      found[-1] = Stage(bucket, found[-1].start, i + 1)
    else:
      found.append(Stage(bucket, i, i + 1))
  return found


class _Options(NamedTuple):
  """The static arguments of a call; None for `run` is `tile.run`."""

  spec: reference.Spec
  max_position: int | None
  run: Callable[..., tuple[reference.State, jax.Array]] | None


def first_rows(state: reference.State, rows: int) -> reference.State:
  """Returns the state with the first `rows` rows of its memory."""
  cut = {name: getattr(state, name)[:, :, :rows] for name in _ROWS}
  return state._replace(**cut)


def _recomputed(function: Callable) -> Callable:
  """Recomputes like `jax.checkpoint`, but allows effects.

  Interpreted kernels have effects.

  Args:
    function: a function of all the arrays that it reads.
  """

  def forward(*arguments):
    return function(*arguments), arguments

  def backward(arguments, cotangents):
    return jax.vjp(function, *arguments)[1](cotangents)

  return derivative.custom_vjp(function, forward, backward)


def _scan_tiles(options, capacity, state, reset, laid):
  """Scans tiles; `laid` is (inputs, present, resets), with tiles leading."""
  run_tile = options.run or tile.run

  def run(state, reset, laid):
    inputs, present, resets = laid
    if resets is not None:
      state = contract.batched_where(resets, reset, state)
    return run_tile(state, inputs, present, options.spec, capacity)

  if options.run is None:  # other functions store little by themselves
    run = jax.checkpoint(
      run,
      policy=jax.checkpoint_policies.save_only_these_names(rows.ROUTE),
      prevent_cse=False,  # a scan is its own barrier
    )

  def body(state, laid):
    inputs, present, resets = laid
    if resets is None:
      return run(state, reset, laid)
    value = inputs.value
    outputs = jnp.zeros_like(value, inputs.query.dtype)
    return lax.cond(
      jnp.any(present),
      lambda state: run(state, reset, laid),
      lambda state: (state, outputs),
      state,
    )

  return lax.scan(body, state, laid)


def _run(options, layout, state, reset, inputs):
  """Runs a call in one layout; returns the state (not its segment), outputs."""
  capacity, present = state.keys.shape[2], layout_lib.valid(layout)
  resets = None if layout.flags is None else layout.flags.resets
  laid = (
    layout_lib.lay(layout, inputs),
    present,
    resets,
  )
  outputs = []
  for stage in stages(
    options.spec,
    capacity=capacity,
    max_position=options.max_position,
    time=layout.time,
    num_tiles=present.shape[0],
  ):
    part = jax.tree.map(lambda x: x[stage.start : stage.stop], laid)  # noqa: B023
    if resets is None:
      full = state
    else:
      # Rows beyond the stage's slice are not live, but must also be reset.
      full = contract.batched_where(jnp.any(part[2], axis=0), reset, state)
    some, output = _scan_tiles(
      options,
      capacity,
      first_rows(state, stage.rows),
      first_rows(reset, stage.rows),
      part,
    )
    whole = {
      name: jnp.concatenate(
        [getattr(some, name), getattr(full, name)[:, :, stage.rows :]], axis=2
      )
      for name in _ROWS
    }
    state = some._replace(**whole)
    outputs.append(output)
  return state, layout_lib.unlay(layout, jnp.concatenate(outputs))


def _in_pieces(options, state, reset, inputs, segment_ids):
  """Does what `_run` does, for rows cut into any number of segments."""
  time, piece = segment_ids.shape[1], PIECE

  @_recomputed
  def run(state, reset, x):
    inputs, segment_ids = x
    return _indexed(options, state, reset, inputs, segment_ids, piece + 1)

  # Where a piece begins, a segment may have seen all tokens before it.
  if options.max_position is not None:
    options = options._replace(max_position=options.max_position + time)
  xs = jax.tree.map(
    lambda x: contract.cut_time(x, piece), (inputs, segment_ids)
  )
  state, outputs = lax.scan(lambda state, x: run(state, reset, x), state, xs)
  outputs = jnp.moveaxis(outputs, 0, 1)
  outputs = outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])
  return state, outputs[:, :time]


def _places(spec, state, reset, segment_ids, time):
  return layout_lib.places(
    segment_ids,
    state.segment_id,
    state.position % spec.chunk_size,
    reset.position % spec.chunk_size,
    time=time,
    chunk=spec.chunk_size,
  )


def _indexed(options, state, reset, inputs, segment_ids, num_tiles):
  """Calls `_run` with tokens laid by index; also sets the new segment id."""
  spec = options.spec
  where = _places(spec, state, reset, segment_ids, inputs.query.shape[1])
  layout = layout_lib.indexed(where, chunk=spec.chunk_size, num_tiles=num_tiles)
  state, outputs = _run(options, layout, state, reset, inputs)
  return state._replace(segment_id=where.segment_id), outputs


def chunk(
  call: dispatch.Call,
  run: Callable[..., tuple[reference.State, jax.Array]] | None = None,
) -> tuple[reference.State, jax.Array]:
  """Computes what `reference` does, in chunk form; see `Op.chunk`.

  Args:
    call: the call.
    run: runs a tile in place of `tile.run`. What it saves for the gradient is
      saved for every tile.
  """
  state, inputs, spec, segment_ids = call[:4]
  reset, max_position = call.reset, call.max_position
  options = _Options(spec, max_position, run)
  (batch, time), size = inputs.query.shape[:2], spec.chunk_size
  whole = -(-time // size)
  if segment_ids is None:
    if max_position == 0:  # all rows start with a chunk
      layout = layout_lib.Layout(batch, time, size)
      state, outputs = _run(options, layout, state, reset, inputs)
      segment_id = contract.next_segment_id(state.segment_id)
      return state._replace(segment_id=segment_id), outputs
    num_tiles = -(-(time + size - 1) // size)
    return _indexed(options, state, reset, inputs, None, num_tiles)

  # Every segment may leave a tile partly empty. Tiles that stay empty cost
  # memory for their tokens, but no time.
  num_tiles = min(2 * whole + 2, time + 1)
  usual = functools.partial(_indexed, options, num_tiles=num_tiles)
  if num_tiles == time + 1:
    return usual(state, reset, inputs, segment_ids)
  where = _places(spec, state, reset, segment_ids, time)
  return lax.cond(
    where.needed <= num_tiles,
    usual,
    functools.partial(_in_pieces, options),
    state,
    reset,
    inputs,
    segment_ids,
  )
