"""Infini-attention in chunk form, as matrix products in plain JAX.

Local attention and memory are independent. `softmax_attention` computes the
former. `chunking.chunked` scans over tiles of the memory. Feature maps are
applied before tokens are laid into tiles.

In the algebra of one tile rows are tokens, Q and K are their features, M' and
z' what they read from before the tile, and U what they write. In segments all
rows read M' and z':

  E = V - diag(K z' + eps)^-1 K M',       Y = diag(Q z' + eps)^-1 Q M'

In the form per token a row also reads what the rows above it wrote. With S =
strict(K K^T), R = strict(Q K^T) and 1 a column of ones,

  d = K z' + S 1 + eps,    (I + diag(d)^-1 S) E = V - diag(d)^-1 K M'
  Y = diag(Q z' + R 1 + eps)^-1 (Q M' + R U)

This is a delta rule's triangular system with known divisors. U is E, or V with
the linear rule. Then M <- M + K^T U, z <- z + K^T 1. A tile's empty places hold
zeros and write nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.infini_attention import reference
from memcomp_kernels.math import delta
from memcomp_kernels.softmax_attention import reference as attention
from memcomp_kernels.softmax_attention import tile as attention_tile


def chunk(call: dispatch.Call) -> tuple[reference.State, jax.Array]:
  """Computes what `reference` does, in chunk form; see `Op.chunk`."""
  state, inputs, spec, segment_ids = call[:4]
  local, attended = attention_tile.chunk(
    call._replace(
      state=_window(state),
      inputs=attention.Inputs(inputs.query, inputs.key, inputs.value),
      spec=spec.local(),
      reset_state=None if call.reset_state is None else _window(call.reset),
    )
  )
  time = inputs.query.shape[1]
  # Tiles are segments; in the form per token, their size is free.
  free = min((call.tiling or form_lib.DEFAULT).tile_time, time)
  form = form_lib.Form(
    spec=spec,
    tile_time=spec.segment_size if spec.chunked else free,
    run_tile=run,
    memories=("memory", "normalizer"),
    starts=("memory_start", "normalizer_start") if spec.chunked else (),
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
  position = state.position % spec.segment_size if spec.chunked else None
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


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, None]:
  """Reads and writes one tile; see `Form.run_tile`.

  The memories are M `[batch, heads, key, value]` and z `[batch, heads, key]`,
  and reads have their dtype. The inputs are features of queries and of keys,
  and values, `[batch, heads, tile, dim]`.
  """
  (query, key, value), starts, spec = call.inputs, call.starts, call.spec
  dtype, time = query.dtype, query.shape[2]
  memory, normalizer = call.memories
  start = jnp.concatenate([starts[0], starts[1][..., None]], axis=-1)
  value = value.astype(memory.dtype)

  def met(x):
    """Returns reads of M', sums with eps, and shares of the rows above."""
    old = contract.product("bhtk,bhkv->bhtv", x, start, dtype)
    old, sums = old[..., :-1], old[..., -1:] + spec.eps
    if spec.chunked:
      return old, sums, None
    shares = contract.product("bhtk,bhik->bhti", x, key, dtype)
    shares = jnp.where(jnp.tril(jnp.ones((time, time), bool), -1), shares, 0)
    return old, sums + jnp.sum(shares, axis=-1, keepdims=True), shares

  written = value
  if spec.rule == "delta":
    old, sums, shares = met(key)
    written = value - old / sums
    if shares is not None:
      written = delta.solve(shares / sums, written)
  read, sums, shares = met(query)
  if shares is not None:
    read += contract.product("bhti,bhiv->bhtv", shares, written, dtype)
  memory += contract.product("bhik,bhiv->bhkv", key, written, dtype)
  normalizer += jnp.sum(key.astype(normalizer.dtype), axis=2)
  return (memory, normalizer), read / sums, None
