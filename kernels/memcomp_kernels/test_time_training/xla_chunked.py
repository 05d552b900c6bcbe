"""Test-time training in chunk form on matrix units, in plain JAX.

A scan over tiles by `chunking.chunked`; `tile.py` has their algebra. With
stale gradients one tile is one chunk of the paper; with gradients per token
the tile is free, and the result does not depend on it.
"""

import jax

from memcomp_kernels.chunking import chunked
from memcomp_kernels.test_time_training import reference, tile, tilings


def _take_apart(state: reference.State) -> chunked.Parts:
  constants = state.norm_scale, state.norm_bias
  starts = None
  if state.starts is not None:
    starts = tile.flatten(state.starts, *constants)
  memories = tile.flatten(state.layers, *constants)
  return chunked.Parts(memories, starts, state.position, state.segment_id)


def _put_together(parts: chunked.Parts) -> reference.State:
  layers, norm_scale, norm_bias = tile.unflatten(parts.memories)
  starts = None
  if parts.starts is not None:
    starts, _, _ = tile.unflatten(parts.starts)
  return reference.State(
    layers=layers,
    starts=starts,
    position=parts.position,
    norm_scale=norm_scale,
    norm_bias=norm_bias,
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
  tiling = tiling or tilings.Tiling()
  form = chunked.Form(
    spec=spec,
    tiling=tiling,
    tile_time=tilings.tile_time(spec, tiling),
    run_tile=tile.run,
    take_apart=_take_apart,
    put_together=_put_together,
  )
  return chunked.chunk(
    form, state, inputs, segment_ids=segment_ids, reset_state=reset_state
  )
