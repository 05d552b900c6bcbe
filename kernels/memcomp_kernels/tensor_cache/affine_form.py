"""Tensor Cache by kernels, for the two parts of its XLA form.

Local attention uses a library where that supports the call, else plain JAX. The
memory of the outer rule and of the delta rule has affine tiles (`affine`). Each
segment begins a tile of its own, and with "all" each chunk does.

Lanes (timescales and slots) are heads that share queries and keys. With E and g
of `tile.py`, P_{r,i} = E_{b(r),i+1} g_i (q_r . k_i), w_i = E_{C,i+1} g_i, and

  (I + S) [U, W] = [V, diag(E_{r,0}) K],  S_{r,i} = E_{r,i+1} g_i (k_r . k_i)

where the outer rule has U = V and W = 0,

  "evicted"   A <- E_{C,0} A + K^T diag(w) (U - W A)
              Y = P U + (diag(E_{b(r),0}) Q - P W) A
  "all"       a tile is a chunk, whose tokens do not read its writes: U = V,
              W = K, Y = Q A

Reads are per lane. Weights and the normaliser are applied afterwards. Tokens
that write nothing have gates of zero.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import affine, contract, dispatch, window
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.math import delta
from memcomp_kernels.softmax_attention import tile as attention_tile
from memcomp_kernels.tensor_cache import reference, tile, xla_chunked

Engines = tuple[form_lib.Engine, form_lib.Engine]
"""Engines of updates that are not defined per chunk, and of those that are."""


def unsupported(spec: reference.Spec) -> str | None:
  """Says why the memory's tiles are not affine, or returns None."""
  if spec.rule == "wedge":
    return 'no kernel for rule="wedge"'
  if spec.chunk_mean:
    return "no kernel for chunk_mean=True"
  return None


def kernels(engines: Engines, library: Any) -> xla_chunked.Kernels:
  """Returns what runs the two parts of the XLA form on kernels.

  Args:
    engines: engines of the memory.
    library: module of `softmax_attention` that attends where it supports the
      call.
  """

  def attend(call):
    if library.unsupported(call) is None:
      return library.chunk(call)
    return attention_tile.chunk(call)

  return xla_chunked.Kernels(attend, functools.partial(memory, engines))


def memory(
  engines: Engines,
  where: window.Placement,
  state: reference.State,
  reset_state: reference.State,
  tokens: reference.Inputs,
  writes: jax.Array,
  spec: reference.Spec,
) -> tuple[tile.Carry, jax.Array]:
  """Does what `xla_chunked.memory` does, with tiles run by `engines`."""
  engine = engines[spec.chunked]
  # The order is that of `window.compact`: runs, then padding.
  ids = None if where.source is None else where.run[:, where.prior :] + 1
  laid = tile.masked(tokens, writes[..., None, None])
  laid = laid._replace(read_route=None, read_mix=None)
  time = tokens.query.shape[1]
  size = spec.chunk_size if spec.chunked else tile.tile_time(spec, time)
  scan = functools.partial(_scan, state, reset_state, ids)
  memory, read = scan(form(spec, size, engine), laid, lambda x: x.memory)
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
    found, along = scan(
      form(spec, size, prepare=prepare_sums),
      laid,
      lambda x: x.normalizer[..., None],
    )
    normalizer = jax.tree.map(lambda x: x[..., 0], found)
    read /= jnp.maximum(jnp.abs(along), 1)
  read = jnp.sum(tile.read_weights(tokens)[..., None] * read, axis=-2)
  memories, starts = map(reference.Memories, memory, normalizer)
  carry = tile.Carry(memories, starts if spec.chunked else None, None)
  return carry, read.astype(tokens.query.dtype)


def _scan(state, reset_state, ids, form, tokens, take):
  """Runs the arrays that `take` selects from memories, in the chunk form.

  Returns:
    The array, and that of the chunk's start (None without chunks), `[batch,
    heads, timescales, slots, key, value]`; reads `[batch, time, heads, lanes,
    value]`.
  """
  spec = form.spec

  def parts(state):
    def lanes(memories):
      x = take(memories)
      return x.reshape(x.shape[0], -1, *x.shape[-2:])

    return MemoryState(
      lanes(state.memories),
      lanes(state.starts) if spec.chunked else None,
      state.position % spec.chunk_size if spec.chunked else None,
      jnp.ones_like(state.segment_id),  # the id of the state's run in `ids`
    )

  batch, time, heads = tokens.query.shape[:3]
  new, read, _ = chunked.run(
    form,
    dispatch.Call(parts(state), tokens, spec, ids, parts(reset_state)),
  )
  lanes = heads, spec.timescales, spec.num_slots
  memory, start = jax.tree.map(
    lambda x: x.reshape(batch, *lanes, *x.shape[2:]), (new.memory, new.start)
  )
  return (memory, start), read.reshape(batch, time, heads, -1, read.shape[-1])


class MemoryState(NamedTuple):
  """The memory's part of the state, `[batch, heads * lanes, key, value]`.

  `start` and `position` are None where nothing is defined per chunk.
  """

  memory: jax.Array
  start: jax.Array | None
  position: jax.Array | None
  segment_id: jax.Array


def prepare(tokens: reference.Inputs, spec: reference.Spec) -> affine.Tile:
  """Computes the part of the tile's algebra that needs no memory matrix.

  Tokens are `[batch, heads, tile, ...]`.
  """
  return _prepare(tokens, spec, erases=spec.rule == "delta")


def prepare_sums(tokens: reference.Inputs, spec: reference.Spec) -> affine.Tile:
  """Does what `prepare` does, for the normalizer: no rule corrects sums."""
  return _prepare(tokens, spec, erases=False)


def form(
  spec: reference.Spec,
  tile_time: int,
  engine: form_lib.Engine | None = None,
  prepare: Callable[..., affine.Tile] = prepare,
) -> form_lib.Form:
  """Returns the form of the memory.

  Args:
    spec: the memory's options, without "wedge" and chunk means.
    tile_time: tokens per tile; the chunk size with "all".
    engine: what runs the tiles.
    prepare: `prepare` or `prepare_sums`.
  """
  return form_lib.Form(
    spec=spec,
    tile_time=tile_time,
    prepare=prepare,
    run_tile=run,
    memories=("memory",),
    starts=("start",) if spec.chunked else (),
    engine=engine,
  )


def _prepare(tokens, spec, erases: bool) -> affine.Tile:
  if spec.chunked:
    return _by_chunk(tokens, erases)
  return _evicted(tokens, spec, erases)


def _by_chunk(tokens, erases) -> affine.Tile:
  factor, rate = tile.gates(tokens)
  kept = jnp.pad(factor, [(0, 0)] * 3 + [(0, 1)], constant_values=1)
  kept = lax.cumprod(kept, axis=3, reverse=True)
  share = (kept[..., 1:] * rate)[..., None]
  key = tokens.key[:, :, None]

  def lanes(x):
    return jnp.repeat(x, share.shape[2], axis=1)

  write = lanes(tokens.value).astype(share.dtype)
  return affine.Tile(
    write=write,
    erase=lanes(tokens.key) if erases else None,
    # This is the only factor that is rounded.
    key=affine.join_heads(share * key).astype(key.dtype),
    query=tokens.query,
    log_scale=None,
    output=jnp.zeros_like(write),
    total=affine.join_heads(kept[..., 0]),
  )


def _evicted(tokens, spec, erases) -> affine.Tile:
  dtype = tokens.query.dtype
  product = functools.partial(contract.product, dtype=dtype)
  survival, rate = tile.survival(tokens)
  before, after = survival[..., :-1, :], survival[..., 1:, :]
  read = after if spec.read_after_write else before

  def shares(of, query):
    scores = product("bhrk,bhik->bhri", query, tokens.key)[:, :, None]
    return of[..., 1:] * rate[..., None, :] * scores

  inner = shares(read, tokens.query)
  value = tokens.value[:, :, None].astype(inner.dtype)
  query = read[..., 0, None] * tokens.query[:, :, None]
  erase = None
  if erases:
    decayed = before[..., 0, None] * tokens.key[:, :, None]
    value = jnp.broadcast_to(value, (*decayed.shape[:-1], value.shape[-1]))
    target = jnp.concatenate([value, decayed], axis=-1)
    solved = delta.solve(shares(before, tokens.key), target)
    value, erase = jnp.split(solved, [value.shape[-1]], axis=-1)
    query = query - product("bhnri,bhnik->bhnrk", inner, erase)
    output = product("bhnri,bhniv->bhnrv", inner, value)
  else:
    output = product("bhnri,bhiv->bhnrv", inner, value[:, :, 0])
  share = (survival[..., -1, 1:] * rate)[..., None]
  if erase is not None:
    erase = affine.join_heads(share * erase).astype(dtype)
  key = jnp.broadcast_to(tokens.key[:, :, None], query.shape)
  return affine.Tile(
    write=affine.join_heads(share * value),
    erase=erase,
    key=affine.join_heads(key),
    query=affine.join_heads(query).astype(dtype),
    log_scale=None,
    output=affine.join_heads(output),
    total=affine.join_heads(survival[..., -1, 0]),
  )


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, None]:
  """Writes and reads one tile; see `Form.run_tile`.

  The memory is A, `[batch, heads * lanes, key, value]`.
  """
  (memory,), starts, prepared, _, spec, _ = call
  start = starts[0] if spec.chunked else None
  memory, output = affine.run(memory, prepared, start)
  dtype = output_dtype(spec, prepared.query.dtype, output.dtype)
  return (memory,), output.astype(dtype), None


def output_dtype(spec: reference.Spec, dtype: Any, wide: Any) -> Any:
  """Returns the dtype of reads: the queries', or `wide` if lanes are summed.

  The kernels write the same, because both may run pages of one call.
  """
  plain = spec.timescales == spec.num_slots == 1 and not spec.read_norm
  return dtype if plain else wide
