"""Tensor Cache by kernels, for the two parts of its XLA form.

Local attention uses a library where that supports the call, else plain JAX. The
memory's tiles are those of `affine_tile`. Each segment begins a tile of its
own, and with "all" each chunk does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch, window
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.softmax_attention import xla_chunked as attention_xla
from memcomp_kernels.tensor_cache import (
  affine_tile,
  reference,
  tile,
  xla_chunked,
)

Engines = tuple[form_lib.Engine, form_lib.Engine]
"""Engines of updates that are not defined per chunk, and of those that are."""


def unsupported(spec: reference.Spec) -> str | None:
  """Says why the memory's tiles are not affine, or returns None."""
  if spec.rule == "wedge":
    return 'no kernel for rule="wedge"'
  if spec.chunk_mean:
    return "no kernel for chunk_mean=True"
  return None


def implementation(
  engines: Engines, library: Any
) -> Callable[[dispatch.Call], tuple[reference.State, jax.Array]]:
  """Returns a `chunk` whose two parts run on kernels.

  Args:
    engines: engines of the memory.
    library: module of `softmax_attention` that attends where it supports the
      call.
  """

  def attend(call):
    if library.unsupported(call) is None:
      return library.chunk(call)
    return attention_xla.chunk(call)

  kernels = xla_chunked.Kernels(attend, functools.partial(memory, engines))
  return functools.partial(xla_chunked.chunk, kernels=kernels)


def memory(
  engines: Engines,
  plan: window.Plan,
  state: reference.State,
  reset_state: reference.State,
  tokens: tile.Tokens,
  writes: jax.Array,
  spec: reference.Spec,
) -> tuple[tile.Carry, jax.Array]:
  """Does what `xla_chunked.memory` does, with tiles run by `engines`."""
  engine = engines[spec.chunked]
  # The order is that of `window.compact`: runs, then padding.
  ids = None if plan.source is None else plan.run[:, plan.prior :] + 1
  laid = tile.masked(tokens, writes[..., None, None])
  laid = laid._replace(read_route=None, read_mix=None)
  scan = functools.partial(_scan, state, reset_state, ids)
  memory, read = scan(spec, engine, laid, lambda x: x.memory)
  normalizer = None, None
  if spec.read_norm:
    # The normalizer is a vector, in float32. It decides whether a read is
    # divided at all.
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
  memories, starts = map(reference.Memories, memory, normalizer)
  carry = tile.Carry(memories, starts if spec.chunked else None, None)
  return carry, read.astype(tokens.query.dtype)


def _scan(state, reset_state, ids, spec, engine, tokens, take):
  """Runs the arrays that `take` selects from memories, in the chunk form.

  Returns:
    The array, and that of the chunk's start (None without chunks), `[batch,
    heads, timescales, slots, key, value]`; reads `[batch, time, heads, lanes,
    value]`.
  """

  def parts(state):
    def lanes(memories):
      x = take(memories)
      return x.reshape(x.shape[0], -1, *x.shape[-2:])

    return affine_tile.Lanes(
      lanes(state.memories),
      lanes(state.starts) if spec.chunked else None,
      state.position % spec.chunk_size if spec.chunked else None,
      jnp.ones_like(state.segment_id),  # the id of the state's run in `ids`
    )

  batch, time, heads = tokens.query.shape[:3]
  size = spec.chunk_size if spec.chunked else tile.tile_time(spec, time)
  new, read, _ = chunked.run(
    affine_tile.form(spec, size, engine),
    dispatch.Call(parts(state), tokens, spec, ids, parts(reset_state)),
  )
  lanes = heads, spec.timescales, spec.num_slots
  memory, start = jax.tree.map(
    lambda x: x.reshape(batch, *lanes, *x.shape[2:]), (new.memory, new.start)
  )
  return (memory, start), read.reshape(batch, time, heads, -1, read.shape[-1])
