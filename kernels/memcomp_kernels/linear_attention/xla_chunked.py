"""Linear attention in chunk form on matrix units, in plain JAX.

Features first, sums divided last; between them the recurrence of S alone, with
z as one more of its columns, as a scan over tiles by `chunking.chunked`. The
tile is free: the result does not depend on it.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.linear_attention import reference, tile, tilings
from memcomp_kernels.math import feature_maps


def _take_apart(state: reference.State) -> chunked.Parts:
  return chunked.Parts((state.memory,), None, None, state.segment_id)


def _put_together(parts: chunked.Parts) -> reference.State:
  (memory,) = parts.memories
  return reference.State(memory, None, parts.segment_id)


def _joined(state: reference.State) -> reference.State:
  """The same state with z as the memory's last column."""
  if state.normalizer is None:
    return state
  columns = state.memory, state.normalizer[..., None]
  return state._replace(
    memory=jnp.concatenate(columns, axis=-1), normalizer=None
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
  dtype, wide = inputs.query.dtype, state.memory.dtype
  phi = feature_maps.FEATURE_MAPS[spec.feature_map]

  def features(x):
    return phi(x.astype(wide)).astype(dtype)

  value = inputs.value
  if spec.normalize:
    ones = jnp.ones((*value.shape[:-1], 1), value.dtype)
    value = jnp.concatenate([value, ones], axis=-1)
  form = chunked.Form(
    spec=reference.Spec(
      feature_map="identity",
      normalize=False,
      forget_gate=spec.forget_gate,
      scale=1.0,
    ),
    tile_time=min(tiling.tile_time, value.shape[1]),
    prepare=tile.prepare,
    run_tile=tile.run,
    take_apart=_take_apart,
    put_together=_put_together,
    engine=engine,
  )
  joined, y = chunked.chunk(
    form,
    _joined(state),
    inputs._replace(
      query=features(inputs.query), key=features(inputs.key), value=value
    ),
    segment_ids=segment_ids,
    reset_state=None if reset_state is None else _joined(reset_state),
  )
  y = spec.read_scale(inputs.key.shape[-1]) * y
  if not spec.normalize:
    return joined, y.astype(dtype)
  state = joined._replace(
    memory=joined.memory[..., :-1], normalizer=joined.memory[..., -1]
  )
  return state, (y[..., :-1] / (y[..., -1:] + spec.eps)).astype(dtype)
