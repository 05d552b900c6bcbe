"""Infini-attention as matrix products, in plain JAX.

Local attention and memory are independent. `softmax_attention` computes the
former. `chunking.chunked` scans over tiles of the memory (`tile.py` has their
algebra). Feature maps are applied before tokens are laid into tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.infini_attention import reference, tile
from memcomp_kernels.softmax_attention import softmax_attention as attention


def chunk(call: dispatch.Call) -> tuple[reference.State, jax.Array]:
  """Computes what `reference` does, in chunk form; see `Op.chunk`."""
  state, inputs, spec, segment_ids = call[:4]
  local, attended = attention.chunk(
    _window(state),
    attention.Inputs(inputs.query, inputs.key, inputs.value),
    spec=spec.local(),
    segment_ids=segment_ids,
    reset_state=_window(call.reset),
    implementation="xla_chunked",
    max_position=call.max_position,
  )
  time = inputs.query.shape[1]
  # Tiles are segments; in the form per token, their size is free.
  free = min((call.tiling or form_lib.DEFAULT).tile_time, time)
  form = form_lib.Form(
    spec=spec,
    tile_time=spec.segment_size if spec.stale else free,
    run_tile=tile.run,
    memories=("memory", "normalizer"),
    starts=("memory_start", "normalizer_start") if spec.stale else (),
  )
  memory, read, _ = chunked.run(
    form,
    call._replace(
      state=_memory(state, spec),
      inputs=_written(inputs, state.keys.dtype),
      reset_state=_memory(call.reset, spec),
    ),
  )
  gate = inputs.read_gate.astype(read.dtype)
  y = gate * read + (1 - gate) * attended.astype(read.dtype)
  if segment_ids is not None:
    y = jnp.where((segment_ids != 0)[..., None, None], y, 0)
  start = None
  if state.start is not None:
    start = reference.Association(memory.memory_start, memory.normalizer_start)
  state = reference.State(
    keys=local.keys,
    values=local.values,
    association=reference.Association(memory.memory, memory.normalizer),
    start=start,
    position=local.position,
    segment_id=local.segment_id,
  )
  return state, y.astype(inputs.query.dtype)


class _Memory(NamedTuple):
  """The memory's part of the state."""

  memory: jax.Array
  normalizer: jax.Array
  memory_start: jax.Array | None
  normalizer_start: jax.Array | None
  position: jax.Array | None
  segment_id: jax.Array


def _window(state: reference.State) -> attention.State:
  """Returns local attention's part of the state."""
  return attention.State(
    state.keys, state.values, state.position, state.segment_id
  )


def _memory(state: reference.State, spec: reference.Spec) -> _Memory:
  position = state.position % spec.segment_size if spec.stale else None
  starts = (None, None) if state.start is None else tuple(state.start)
  return _Memory(*state.association, *starts, position, state.segment_id)


def _written(inputs: reference.Inputs, wide) -> tuple[jax.Array, ...]:
  """Returns features of queries, features of keys, and values."""
  query, key = inputs.memory_query, inputs.memory_key
  query = inputs.query if query is None else query
  key = inputs.key if key is None else key
  query, key = (
    reference.sigma(x.astype(wide)).astype(x.dtype) for x in (query, key)
  )
  return query, key, inputs.value
