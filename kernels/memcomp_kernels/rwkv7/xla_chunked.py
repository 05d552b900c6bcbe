"""RWKV-7 in chunk form on matrix units, in plain JAX.

A scan over tiles by `chunking.chunked`; `tile.py` has their algebra. The
tile is free: the result does not depend on it.
"""

import jax

from memcomp_kernels.chunking import chunked
from memcomp_kernels.math import channel_decay
from memcomp_kernels.rwkv7 import reference, tile

TILING = channel_decay.Tiling(block_time=4)
"""At width 32 a gradient takes a CPU 2.1 s in blocks of 16, 1.2 s in blocks of
8 and 0.25 s in blocks of 4."""


def _take_apart(state: reference.State) -> chunked.Parts:
  return chunked.Parts((state.memory,), None, None, state.segment_id)


def _put_together(parts: chunked.Parts) -> reference.State:
  (memory,) = parts.memories
  return reference.State(memory, parts.segment_id)


def chunk(
  state: reference.State,
  inputs: reference.Inputs,
  *,
  spec: reference.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: reference.State | None = None,
  tiling: channel_decay.Tiling | None = None,
) -> tuple[reference.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `Op.chunk`."""
  tiling = tiling or TILING
  form = chunked.Form(
    spec=spec,
    tiling=tiling,
    tile_time=channel_decay.tile_time(tiling, inputs.query.shape[1]),
    run_tile=tile.run,
    take_apart=_take_apart,
    put_together=_put_together,
  )
  return chunked.chunk(
    form, state, inputs, segment_ids=segment_ids, reset_state=reset_state
  )
