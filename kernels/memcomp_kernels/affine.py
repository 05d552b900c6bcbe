"""One tile of a memory whose reads and writes are affine in the memory.

Only the memory A before the tile depends on earlier tiles. Everything else is
computed for all tiles at once, before the scan over tiles. Rows are tokens:

  E = U - W A                        what the tile writes; U alone without W
  Y = Y_0 + diag(mu) Q A
  A <- a A + K^T E

Where an update is defined per chunk, E and Y use the memory at the start of the
chunk in place of A. Queries and keys may have fewer heads than values. Each of
them is then shared by a group of consecutive heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.math import decay


class Tile(NamedTuple):
  """What a tile needs besides A.

  Factors of matmuls with A or E have the dtype of products. The rest is float32
  or wider.

  Attributes:
    write: U, `[batch, heads, tile, value]`.
    erase: W, `[batch, heads, tile, key]`; None for zeros.
    key: K, `[batch, groups, tile, key]`; heads are a multiple of groups.
    query: Q, `[batch, groups, tile, key]`; its groups may differ from the
      key's.
    log_scale: log mu, `[batch, heads, tile]`; None for zeros.
    output: Y_0, with the shape of `write`.
    total: a, `[batch, heads]`.
  """

  write: jax.Array
  erase: jax.Array | None
  key: jax.Array
  query: jax.Array
  log_scale: jax.Array | None
  output: jax.Array
  total: jax.Array


def form(
  prepare: Callable[[Any, Any], Tile],
  call: dispatch.Call,
  *,
  wide: bool = False,
) -> form_lib.Form:
  """Returns the form of a memory that is one matrix with affine tiles.

  Its tiles are free: their size does not change results.

  Args:
    prepare: (inputs `[batch, heads, tile, ...]`, spec) -> what the tile needs
      besides A.
    call: the call.
    wide: whether Y keeps the dtype of sums. Otherwise Y has the query's dtype.
  """
  tiling = call.tiling or form_lib.DEFAULT
  return form_lib.Form(
    spec=call.spec,
    tile_time=min(tiling.tile_time, call.inputs.query.shape[1]),
    prepare=prepare,
    run_tile=_run_wide if wide else _run_tile,
    memories=("memory",),
  )


def _run_wide(call: form_lib.TileCall):
  (memory,) = call.memories
  memory, output = run(memory, call.inputs)
  return (memory,), output, None


def _run_tile(call: form_lib.TileCall):
  memories, output, _ = _run_wide(call)
  return memories, output.astype(call.inputs.query.dtype), None


def outer_tile(
  query: jax.Array,
  key: jax.Array,
  written: jax.Array,
  log_decay: jax.Array,
) -> Tile:
  """Returns the tile of a memory that sums decayed outer products.

    A_t = a_t A_{t-1} + k_t (x) u_t,      y_t = q_t A_t

  With A before the tile, and mu and Omega of `math.decay`,

    Y = diag(mu) Q A + (Omega * (Q K^T)) U
    A <- mu_C A + K^T diag(Omega_C) U

  Args:
    query: `[batch, groups, tile, key]`, in the dtype of products.
    key: `[batch, groups, tile, key]`.
    written: U, `[batch, heads, tile, value]`, float32 or wider.
    log_decay: `[batch, heads, tile]`, <= 0.
  """
  dtype, groups = query.dtype, query.shape[1]
  factors = decay.decay_factors(log_decay)
  scores = contract.product("bgtk,bgik->bgti", query, key, dtype)
  share = split_heads(factors.between, groups) * scores[:, :, None]
  output = contract.product(
    "bgnti,bgniv->bgntv", share, split_heads(written, groups), dtype
  )
  return Tile(
    write=factors.to_end[..., None] * written,
    erase=None,
    key=key,
    query=query,
    log_scale=decay.running_sums(log_decay).total,
    output=join_heads(output),
    total=factors.total,
  )


def run(
  memory: jax.Array, tile: Tile, start: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns A after the tile, and Y `[batch, heads, tile, value]`.

  Args:
    memory: A before the tile, `[batch, heads, key, value]`.
    tile: what the tile needs besides A.
    start: the memory that E and Y use in place of A; None for A itself.
  """
  error, output = meet(memory if start is None else start, tile)
  groups = tile.key.shape[1]
  written = contract.product(
    "bgik,bgniv->bgnkv",
    tile.key,
    split_heads(error, groups),
    tile.query.dtype,
  )
  memory = tile.total[..., None, None] * memory + join_heads(written)
  return memory, output


def meet(memory: jax.Array, tile: Tile) -> tuple[jax.Array, jax.Array]:
  """Returns E and Y, each `[batch, heads, tile, value]`."""
  dtype, groups = tile.query.dtype, tile.query.shape[1]
  grouped = split_heads(memory, groups)
  read = contract.product("bgtk,bgnkv->bgntv", tile.query, grouped, dtype)
  error = tile.write
  if tile.erase is not None:
    error = error - contract.product(
      "bhtk,bhkv->bhtv", tile.erase, memory, dtype
    )
  return error, add_read(tile, join_heads(read))


def add_read(tile: Tile, read: jax.Array) -> jax.Array:
  """Returns Y, given Q A `[..., heads, tile, value]`."""
  if tile.log_scale is not None:
    read = jnp.exp(tile.log_scale)[..., None] * read
  return tile.output + read


def split_heads(x: jax.Array, groups: int) -> jax.Array:
  """Splits `[batch, heads, ...]` to `[batch, groups, heads / groups, ...]`."""
  return x.reshape(x.shape[0], groups, -1, *x.shape[2:])


def join_heads(x: jax.Array) -> jax.Array:
  """Joins `[batch, groups, heads / groups, ...]` to `[batch, heads, ...]`."""
  return x.reshape(x.shape[0], -1, *x.shape[3:])
