"""Online vector quantisation in chunk form on matrix units, in plain JAX.

A scan over chunks by `chunking.chunked`; `tile.py` has their algebra.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.chunking import chunked
from memcomp_kernels.ovq import reference, tile


def _take_apart(state: reference.State) -> chunked.Parts:
  chunk = state.pending_keys.shape[2]
  taken = jnp.arange(chunk) < state.position[:, None]
  taken = taken[:, None, :, None].astype(state.keys.dtype)
  taken = jnp.broadcast_to(taken, (*state.pending_keys.shape[:3], 1))
  return chunked.Parts(
    memories=(*state[:5], taken),
    starts=None,
    position=state.position,
    segment_id=state.segment_id,
  )


def _put_together(parts: chunked.Parts) -> reference.State:
  keys, values, counts, pending_keys, pending_values, _ = parts.memories
  position = parts.position
  if position is None:
    raise ValueError("chunks are part of the meaning: there is a position")
  return reference.State(
    keys,
    values,
    counts,
    pending_keys,
    pending_values,
    position,
    parts.segment_id,
  )


def chunk(
  state: reference.State,
  inputs: reference.Inputs,
  *,
  spec: reference.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: reference.State | None = None,
) -> tuple[reference.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `Op.chunk`."""
  form = chunked.Form(
    spec=spec,
    tile_time=spec.chunk_size,
    run_tile=tile.run,
    take_apart=_take_apart,
    put_together=_put_together,
  )
  return chunked.chunk(
    form,
    state,
    tile.Laid(inputs, jnp.ones_like(inputs.query[..., :1])),
    segment_ids=segment_ids,
    reset_state=reset_state,
  )
