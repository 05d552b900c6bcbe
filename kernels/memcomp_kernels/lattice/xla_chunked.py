"""Lattice in chunk form, as matrix products in plain JAX.

`chunking.chunked` scans over tiles. With chunk-start gradients one tile is one
chunk (`tile.py`). With gradients per token the tile size is free and does not
change the result (`per_token/tile.py`). Only gradients per token with sparsity
have no chunk form, because every token moves every entry by a threshold. Tokens
are then scanned one by one. The scan is checkpointed, so that its gradient
stores few memories.
"""

import functools
from typing import Any

import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.lattice import reference, tile, tilings
from memcomp_kernels.lattice.per_token import tile as tile_lib

_SCAN_BLOCK = 32  # tokens between two saved states of a scan


def chunk(call: dispatch.Call) -> tuple:
  """Computes what `reference` does, in chunk form; see `Op.chunk`."""
  if not call.spec.stale and call.spec.sparsity:
    return contract.scan(
      functools.partial(reference.step, spec=call.spec),
      call.state,
      call.inputs,
      segment_ids=call.segment_ids,
      reset_state=call.reset_state,
      block=_SCAN_BLOCK,
    )
  return _chunk(call._replace(inputs=lay(call.inputs, call.spec)))


def form(
  spec: reference.Spec, tiling: tilings.Tiling | None, time: int | None = None
) -> form_lib.Form:
  """Returns the form of the memory, for calls that do not scan tokens."""
  del time  # tiles keep their size in short calls
  if spec.stale:
    summed = spec.sums_rates
    return form_lib.Form(
      spec=spec,
      tile_time=spec.chunk_size,
      run_tile=tile.run,
      memories=("memory", "write_rate_sum") if summed else ("memory",),
      # At a chunk's start the sum is zero, so no tile reads it.
      starts=("memory_start", None) if summed else ("memory_start",),
    )
  tiling = tiling or tilings.tiling(spec)
  return form_lib.Form(
    spec=spec,
    tiling=tiling,
    tile_time=tiling.tile_time,
    run_tile=tile_lib.run,
    memories=("memory",),
  )


_chunk = chunked.implementation(form)


def lay(inputs: reference.Inputs, spec: reference.Spec) -> Any:
  """Returns the inputs in the structure that `form` expects."""
  if spec.stale:
    return inputs
  taken = jnp.ones_like(inputs.query[:, :, :1, :1])
  return tile_lib.Laid(inputs, taken)
