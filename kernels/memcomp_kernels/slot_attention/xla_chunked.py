"""Slot attention in chunk form on matrix units, in plain JAX.

A scan over tiles by `chunking.chunked`; `tile.py` has their algebra. The
tile is free: the result does not depend on it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels.chunking import chunked
from memcomp_kernels.math import channel_decay
from memcomp_kernels.slot_attention import reference, tile


def _take_apart(state: reference.State) -> chunked.Parts:
  memories = state.key_memory, state.value_memory
  if state.log_total is not None:
    memories = *memories, state.log_total
  return chunked.Parts(memories, None, None, state.segment_id)


def _put_together(parts: chunked.Parts) -> reference.State:
  keys, values, *total = parts.memories
  return reference.State(
    keys, values, total[0] if total else None, parts.segment_id
  )


class _Laid(NamedTuple):
  """What is laid into tiles; `taken` `[batch, time, heads, 1]` is of ones.

  Empty places hold zeros. A write logit of zero is a write, so with "softmax"
  they are told by what is not one.
  """

  inputs: reference.Inputs
  taken: jax.Array | None


def _run_tile(memories, starts, laid: _Laid, *rest):
  inputs = laid.inputs
  logit = inputs.write_logit
  if logit is not None and laid.taken is not None:
    below = jnp.asarray(2 * reference.EMPTY, logit.dtype)
    inputs = inputs._replace(
      write_logit=jnp.where(laid.taken > 0, logit, below)
    )
  return tile.run(memories, starts, inputs, *rest)


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
  tiling = tiling or channel_decay.Tiling()
  taken = None
  if inputs.write_logit is not None:
    taken = jnp.ones_like(inputs.write_logit[..., :1])
  form = chunked.Form(
    spec=spec,
    tiling=tiling,
    tile_time=channel_decay.tile_time(tiling, inputs.query.shape[1]),
    run_tile=_run_tile,
    take_apart=_take_apart,
    put_together=_put_together,
  )
  return chunked.chunk(
    form,
    state,
    _Laid(inputs, taken),
    segment_ids=segment_ids,
    reset_state=reset_state,
  )
