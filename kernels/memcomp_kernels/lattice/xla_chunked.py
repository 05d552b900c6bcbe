"""Lattice in chunk form on matrix units, in plain JAX.

With stale gradients one tile is one chunk (`primitives.chunked`; `tile.py` has
the algebra). With gradients per token every token's write depends on all slots
after the one before, which has no chunk form here: tokens are scanned, and the
scan is checkpointed, so that its gradient keeps few memories.
"""

import functools

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.lattice import reference, tile, types
from memcomp_kernels.primitives import chunked


def _take_apart(state: types.State) -> chunked.Parts:
  memories, starts = (state.memory,), None
  if state.memory_start is not None:
    starts = (state.memory_start,)
    if state.write_rate_sum is not None:
      memories += (state.write_rate_sum,)
      # At a chunk's start the sum is zero, and no tile reads it.
      starts += (jnp.zeros_like(state.write_rate_sum),)
  return chunked.Parts(memories, starts, state.position, state.segment_id)


def _put_together(parts: chunked.Parts) -> types.State:
  memory, *rate = parts.memories
  return types.State(
    memory=memory,
    memory_start=None if parts.starts is None else parts.starts[0],
    write_rate_sum=rate[0] if rate else None,
    position=parts.position,
    segment_id=parts.segment_id,
  )


def chunk(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
) -> tuple[types.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `api.chunk`."""
  if not spec.stale:
    return contract.scan(
      functools.partial(reference.step, spec=spec),
      state,
      inputs,
      segment_ids=segment_ids,
      reset_state=reset_state,
      block=chunked.SCAN_BLOCK,
    )
  form = chunked.Form(
    spec=spec,
    tile_time=spec.chunk_size,
    run_tile=tile.run,
    step=reference.step,
    take_apart=_take_apart,
    put_together=_put_together,
  )
  return chunked.chunk(
    form, state, inputs, segment_ids=segment_ids, reset_state=reset_state
  )
