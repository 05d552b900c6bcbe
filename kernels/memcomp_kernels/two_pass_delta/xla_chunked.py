"""The two-pass delta rule in chunk form on matrix units, in plain JAX.

A scan over tiles by `chunking.chunked`; `tile.py` has their algebra. The
tile is free: the result does not depend on it.
"""

import jax

from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.two_pass_delta import reference, tile


def _take_apart(state: reference.State) -> chunked.Parts:
  return chunked.Parts(
    (state.key_memory, state.value_memory), None, None, state.segment_id
  )


def _put_together(parts: chunked.Parts) -> reference.State:
  keys, values = parts.memories
  return reference.State(keys, values, parts.segment_id)


def chunk(
  state: reference.State,
  inputs: reference.Inputs,
  *,
  spec: reference.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: reference.State | None = None,
  tiling: form_lib.Tiling | None = None,
) -> tuple[reference.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `Op.chunk`."""
  tiling = tiling or form_lib.Tiling(tile_time=32)
  form = chunked.Form(
    spec=spec,
    tile_time=min(tiling.tile_time, inputs.query.shape[1]),
    run_tile=tile.run,
    take_apart=_take_apart,
    put_together=_put_together,
  )
  return chunked.chunk(
    form, state, inputs, segment_ids=segment_ids, reset_state=reset_state
  )
