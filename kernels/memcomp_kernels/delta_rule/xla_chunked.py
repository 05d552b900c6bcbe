"""The delta rule in chunk form on matrix units, in plain JAX.

A scan over tiles by `chunking.chunked`; `tile.py` has their algebra. The
tile is free: the result does not depend on it.
"""

import jax

from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.delta_rule import reference, tile, tilings


def _take_apart(state: reference.State) -> chunked.Parts:
  return chunked.Parts((state.memory,), None, None, state.segment_id)


def _put_together(parts: chunked.Parts) -> reference.State:
  (memory,) = parts.memories
  return reference.State(memory, parts.segment_id)


def form(
  spec: reference.Spec, tile_time: int, engine: form_lib.Engine | None = None
) -> chunked.Form:
  """The memory under the chunk form, in tiles of so many tokens."""
  return chunked.Form(
    spec=spec,
    tile_time=tile_time,
    prepare=tile.prepare,
    run_tile=tile.run,
    take_apart=_take_apart,
    put_together=_put_together,
    engine=engine,
  )


def chunk(
  state: reference.State,
  inputs: reference.Inputs,
  *,
  spec: reference.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: reference.State | None = None,
  tiling: tilings.Tiling | None = None,
  engine: form_lib.Engine | None = None,
) -> tuple[reference.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `Op.chunk`."""
  tiling = tiling or tilings.Tiling()
  tile_time = min(tiling.tile_time, inputs.query.shape[1])
  return chunked.chunk(
    form(spec, tile_time, engine),
    state,
    inputs,
    segment_ids=segment_ids,
    reset_state=reset_state,
  )
