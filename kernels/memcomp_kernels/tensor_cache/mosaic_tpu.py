"""Tensor Cache by TPU kernels: the XLA form, its two parts by kernels.

Local attention is splash attention where that can do the call, else plain JAX.
The memory's tiles are affine (`affine_tile.py`): each segment, and with "all"
each chunk, begins a tile of its own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.primitives import chunked, window
from memcomp_kernels.primitives.mosaic import affine, modes
from memcomp_kernels.softmax_attention import library_tpu
from memcomp_kernels.softmax_attention import types as attention
from memcomp_kernels.softmax_attention import xla_chunked as attention_xla
from memcomp_kernels.tensor_cache import (
  affine_tile,
  tile,
  tilings,
  types,
  xla_chunked,
)


def chunk(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
  seen: int | None = None,
) -> tuple[types.State, jax.Array]:
  """Equal to `reference`, by TPU kernels; see `api.chunk`.

  Raises:
    NotImplementedError: these kernels do not do it; says why.
  """
  if reason := unsupported(inputs, spec):
    raise NotImplementedError(f"tensor_cache mosaic_tpu: {reason}")
  return xla_chunked.chunk(
    state,
    inputs,
    spec=spec,
    segment_ids=segment_ids,
    reset_state=reset_state,
    seen=seen,
    kernels=xla_chunked.Kernels(_attend, memory),
  )


def unsupported(inputs: types.Inputs, spec: types.Spec) -> str | None:
  """Why the kernels cannot do a call here, or None."""
  if reason := modes.unavailable():
    return reason
  if spec.rule == "wedge":
    return 'no kernel for rule="wedge"'
  if spec.chunk_mean:
    return "no kernel for chunk_mean=True"
  return contract.wrong_dtypes(inputs, "bfloat16", "float32")


def _attend(
  state: attention.State,
  inputs: attention.Inputs,
  *,
  spec: attention.Spec,
  **call: Any,
) -> tuple[attention.State, jax.Array]:
  """Local attention, by the kernel of a library where that does the call."""
  can = library_tpu.unsupported(state, inputs, spec, **call) is None
  function = library_tpu.chunk if can else attention_xla.chunk
  return function(state, inputs, spec=spec, **call)


def memory(
  plan: window.Plan,
  state: types.State,
  reset_state: types.State,
  tokens: tile.Tokens,
  writes: jax.Array,
  spec: types.Spec,
) -> tuple[tile.Carry, jax.Array]:
  """As `xla_chunked.memory`."""
  call = plan, state, reset_state, tokens, writes
  if plan.source is None or not spec.chunked:
    return _by_kernels(*call, spec)
  # The layout has segments begin with a chunk.
  return lax.cond(
    jnp.any(reset_state.position % spec.chunk_size > 0),
    functools.partial(xla_chunked.memory, spec=spec),
    functools.partial(_by_kernels, spec=spec),
    *call,
  )


def _by_kernels(plan, state, reset_state, tokens, writes, spec):
  engine = affine.CHUNK_ENGINE if spec.chunked else affine.ENGINE
  # In the order of `window.compact`: runs, then padding.
  ids = None if plan.source is None else plan.run[:, plan.prior :] + 1
  laid = tile.masked(tokens, writes[..., None, None])
  laid = laid._replace(read_route=None, read_mix=None)
  scan = functools.partial(_scan, state, reset_state, ids)
  memory, read = scan(spec, engine, laid, lambda x: x.memory)
  normalizer = None, None
  if spec.read_norm:
    # A vector, in float32: it decides whether a read is divided at all.
    wide = laid.log_decay.dtype
    laid = laid._replace(
      query=laid.query.astype(wide),
      key=laid.key.astype(wide),
      value=jnp.ones_like(laid.value[..., :1], wide),
    )
    outer = dataclasses.replace(spec, rule="outer")
    found, along = scan(outer, None, laid, lambda x: x.normalizer[..., None])
    normalizer = jax.tree.map(lambda x: x[..., 0], found)
    read /= jnp.maximum(jnp.abs(along), 1)
  read = jnp.sum(tile.read_weights(tokens)[..., None] * read, axis=-2)
  memories, starts = map(types.Memories, memory, normalizer)
  carry = tile.Carry(memories, starts if spec.chunked else None, None)
  return carry, read.astype(tokens.query.dtype)


def _scan(state, reset_state, ids, spec, engine, tokens, take):
  """Runs the arrays that `take` takes from memories, as the chunk form does.

  Returns:
    The array and that of the chunk's start (None without chunks), `[batch,
    heads, timescales, slots, key, value]`; reads `[batch, time, heads, lanes,
    value]`.
  """

  def parts(state):
    def lanes(memories):
      x = take(memories)
      return (x.reshape(x.shape[0], -1, *x.shape[-2:]),)

    return chunked.Parts(
      lanes(state.memories),
      lanes(state.starts) if spec.chunked else None,
      state.position % spec.chunk_size if spec.chunked else None,
      jnp.ones_like(state.segment_id),  # of the state's run, in `ids`
    )

  batch, time, heads = tokens.query.shape[:3]
  size = spec.chunk_size if spec.chunked else tilings.tile_time(spec, time)
  new, read = chunked.chunk(
    affine_tile.form(spec, size, engine),
    parts(state),
    tokens,
    segment_ids=ids,
    reset_state=parts(reset_state),
  )
  lanes = heads, spec.timescales, spec.num_slots
  (memory,), (start,) = jax.tree.map(
    lambda x: x.reshape(batch, *lanes, *x.shape[2:]),
    (new.memories, new.starts if spec.chunked else (None,)),
  )
  return (memory, start), read.reshape(batch, time, heads, -1, read.shape[-1])
