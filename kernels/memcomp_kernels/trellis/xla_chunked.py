"""Trellis in chunk form on matrix units, in plain JAX.

A scan over tiles by `chunking.chunked`; `tile.py` has their algebra. With
stale gradients one tile is one chunk of the paper; with gradients per token
the tile is free, and the result does not depend on it.
"""

import jax

from memcomp_kernels.chunking import chunked
from memcomp_kernels.math import solver
from memcomp_kernels.trellis import reference, tile, tilings


def _take_apart(state: reference.State) -> chunked.Parts:
  starts = None
  key_start, value_start = state.key_memory_start, state.value_memory_start
  if key_start is not None and value_start is not None:
    starts = key_start, value_start
  memories = state.key_memory, state.value_memory
  return chunked.Parts(memories, starts, state.position, state.segment_id)


def _put_together(parts: chunked.Parts) -> reference.State:
  key_memory, value_memory = parts.memories
  key_start, value_start = parts.starts or (None, None)
  return reference.State(
    key_memory=key_memory,
    value_memory=value_memory,
    key_memory_start=key_start,
    value_memory_start=value_start,
    position=parts.position,
    segment_id=parts.segment_id,
  )


def chunk(
  state: reference.State,
  inputs: reference.Inputs,
  *,
  spec: reference.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: reference.State | None = None,
  tiling: tilings.Tiling | None = None,
) -> tuple[reference.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `Op.chunk`."""
  return run(
    state,
    inputs,
    spec=spec,
    segment_ids=segment_ids,
    reset_state=reset_state,
    tiling=tiling,
  )[:2]


def run(
  state: reference.State,
  inputs: reference.Inputs,
  *,
  spec: reference.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: reference.State | None = None,
  tiling: tilings.Tiling | None = None,
) -> tuple[reference.State, jax.Array, solver.Stats | None]:
  """As `chunk`; also returns how systems were solved, `[batch, heads]`.

  None with stale gradients, where there is nothing to solve.
  """
  return chunked.run(
    form(spec, tiling or tilings.Tiling()),
    state,
    inputs,
    segment_ids=segment_ids,
    reset_state=reset_state,
  )


def form(spec: reference.Spec, tiling: tilings.Tiling) -> chunked.Form:
  """Trellis for `chunking.chunked`."""
  return chunked.Form(
    spec=spec,
    tiling=tiling,
    tile_time=tilings.tile_time(spec, tiling),
    run_tile=tile.run,
    take_apart=_take_apart,
    put_together=_put_together,
  )
