"""Infini-attention on matrix units, in plain JAX.

Local attention and memory do not see each other: `softmax_attention`, and a
scan over tiles of the memory by `chunking.chunked` (`tile.py` has their
algebra). Features are taken before tokens are laid into tiles.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.chunking import chunked
from memcomp_kernels.infini_attention import reference, tile, tilings
from memcomp_kernels.softmax_attention import softmax_attention as attention


def chunk(
  state: reference.State,
  inputs: reference.Inputs,
  *,
  spec: reference.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: reference.State | None = None,
  max_position: int | None = None,
  tiling: tilings.Tiling | None = None,
) -> tuple[reference.State, jax.Array]:
  """Equal to `reference`, in chunk form; see `Op.chunk`."""
  reset_state = state if reset_state is None else reset_state
  local, attended = attention.chunk(
    _window(state),
    attention.Inputs(inputs.query, inputs.key, inputs.value),
    spec=spec.local(),
    segment_ids=segment_ids,
    reset_state=_window(reset_state),
    implementation="xla_chunked",
    max_position=max_position,
  )
  time = inputs.query.shape[1]
  form = chunked.Form(
    spec=spec,
    tile_time=tilings.tile_time(spec, tiling or tilings.Tiling(), time),
    run_tile=tile.run,
    take_apart=_same,
    put_together=_same,
  )
  parts, read = chunked.chunk(
    form,
    _parts(state, spec),
    _written(inputs, state.keys.dtype),
    segment_ids=segment_ids,
    reset_state=_parts(reset_state, spec),
  )
  gate = inputs.read_gate.astype(read.dtype)
  y = gate * read + (1 - gate) * attended.astype(read.dtype)
  if segment_ids is not None:
    y = jnp.where((segment_ids != 0)[..., None, None], y, 0)
  start = None if parts.starts is None else reference.Association(*parts.starts)
  state = reference.State(
    keys=local.keys,
    values=local.values,
    association=reference.Association(*parts.memories),
    start=start,
    position=local.position,
    segment_id=local.segment_id,
  )
  return state, y.astype(inputs.query.dtype)


def _same(parts: chunked.Parts) -> chunked.Parts:
  """The scheme's own parts are the memory's state here."""
  return parts


def _window(state: reference.State) -> attention.State:
  """Local attention's part of the state."""
  return attention.State(
    state.keys, state.values, state.position, state.segment_id
  )


def _parts(state: reference.State, spec: reference.Spec) -> chunked.Parts:
  """The memory's part of the state."""
  position = state.position % spec.segment_size if spec.stale else None
  starts = None if state.start is None else tuple(state.start)
  return chunked.Parts(
    tuple(state.association), starts, position, state.segment_id
  )


def _written(inputs: reference.Inputs, wide) -> tuple[jax.Array, ...]:
  """Features of queries and of keys, and values."""
  query, key = inputs.memory_query, inputs.memory_key
  query = inputs.query if query is None else query
  key = inputs.key if key is None else key
  query, key = (
    reference.sigma(x.astype(wide)).astype(x.dtype) for x in (query, key)
  )
  return query, key, inputs.value
