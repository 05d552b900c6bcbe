"""Lattice in chunk form on matrix units, in plain JAX.

A scan over tiles by `chunking.chunked`. With stale gradients one tile is one
chunk of the meaning (`tile.py`); with gradients per token the tile is free, and
the result does not depend on it (`token_tile.py`). Only with sparsity as well,
where every token moves every entry by a threshold, is there no such form:
tokens are scanned, and the scan is checkpointed, so that its gradient keeps few
memories.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.chunking import chunked
from memcomp_kernels.lattice import reference, tile, tilings
from memcomp_kernels.lattice.per_token import tile as tile_lib
from memcomp_kernels.math import solver

_SCAN_BLOCK = 32  # tokens between two saved states where tokens are scanned


def _take_apart(state: reference.State) -> chunked.Parts:
  memories, starts = (state.memory,), None
  if state.memory_start is not None:
    starts = (state.memory_start,)
    if state.write_rate_sum is not None:
      memories += (state.write_rate_sum,)
      # At a chunk's start the sum is zero, and no tile reads it.
      starts += (jnp.zeros_like(state.write_rate_sum),)
  return chunked.Parts(memories, starts, state.position, state.segment_id)


def _put_together(parts: chunked.Parts) -> reference.State:
  memory, *rate = parts.memories
  return reference.State(
    memory=memory,
    memory_start=None if parts.starts is None else parts.starts[0],
    write_rate_sum=rate[0] if rate else None,
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
  """As `chunk`; also returns how the writes were found, see `Op.run`."""
  packing = {"segment_ids": segment_ids, "reset_state": reset_state}
  if not spec.stale and spec.sparsity:
    step = functools.partial(reference.step, spec=spec)
    scanned = contract.scan(step, state, inputs, block=_SCAN_BLOCK, **packing)
    return (*scanned, None)
  laid = lay(inputs, spec)
  return chunked.run(form(spec, tiling), state, laid, **packing)


def form(spec: reference.Spec, tiling: tilings.Tiling | None) -> chunked.Form:
  """Lattice for `chunking.chunked`, but for tokens that are scanned."""
  if spec.stale:
    return chunked.Form(
      spec=spec,
      tile_time=spec.chunk_size,
      run_tile=tile.run,
      take_apart=_take_apart,
      put_together=_put_together,
    )
  tiling = tiling or tilings.tiling(spec)
  return chunked.Form(
    spec=spec,
    tiling=tiling,
    tile_time=tiling.tile_time,
    run_tile=tile_lib.run,
    take_apart=_take_apart,
    put_together=_put_together,
  )


def lay(inputs: reference.Inputs, spec: reference.Spec) -> Any:
  """The inputs as `form` wants them."""
  if spec.stale:
    return inputs
  taken = jnp.ones((*inputs.query.shape[:2], 1, 1), inputs.query.dtype)
  return tile_lib.Laid(inputs, taken)
