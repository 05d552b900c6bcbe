"""Trellis's write directions per token on a GPU, exact: by sweeps.

Inside a tile, of the memory M before it and written keys or values w,

  z_t = mu_{t-1} M w_t - sum_{i<t} Omega_{t-1,i} (w_t . w_i) u_i,   u_t = g(z_t)

(`tile.py`; u has the write rate). All tokens at once, over and over: u <- g(z)
is a product on the matrix units and g of all rows. Row t does not move once
those before it do not, so that a tile of 64 tokens is exact after 63 sweeps
whatever g is, and often after a few: they end when no u moves, as the matrix
units take it. The adjoint is the same from the last token on, and linear:

  dz_t = J_t (du_t - sum_{s>t} Omega_{s-1,t} (w_s . w_t) dz_s)

Chunks of fewer tokens than a tile are such a system too, of blocks: a chunk's
tokens share the memory before it, so that z_t has Omega_{b-1,i} and the u of
earlier chunks alone, b the chunk's first token. Four chunks of 16 are exact
after three sweeps; the fourth finds that nothing moves.

Rows to come may overflow on the way, and zero times infinity would spoil rows
that are done: what is not finite counts as zero until the end. If by then
something is, all becomes nan, as nothing later would be finite either.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.pallas_gpu import full_tiles, gates, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed

_LARGEST = 3e38
"""What counts as finite: below bfloat16's largest number, as stored."""


def couple(refs: dict[str, Any], scores: jax.Array, block: int) -> None:
  """Stores what u_i is to z_t in `coupling`, with `scores` w_t . w_i."""
  scores = scores * between(refs, block)
  refs["coupling"][...] = scores.astype(refs["coupling"].dtype)


def between(refs: dict[str, Any], block: int) -> jax.Array:
  """Omega_{t-1,i}, zero from the diagonal on; of blocks, Omega_{b-1,i}."""
  return gates.between(refs["before"], refs["since"], block=block)


def from_start(refs: dict[str, Any], width: int) -> jax.Array:
  """mu_{t-1} (of blocks, mu_{b-1}) in `width` columns."""
  return jnp.exp(gates.along(refs["before"], 0, width))


def solve(
  refs: dict[str, Any],
  memory: Any,
  directions: Callable[[jax.Array], jax.Array],
  block: int,
) -> None:
  """Finds `u`, `[tokens, slots]` in shared memory; commits it.

  Args:
    refs: `written`, committed; places for `coupling` and `u`.
    memory: reference to the memory before the tile, committed.
    directions: z -> u.
    block: tokens whose gradients are taken at one memory, a power of 2.
  """
  written = refs["written"]
  z, scores = products(
    [(written, transposed(memory))], [(written, transposed(written))]
  )
  z = from_start(refs, z.shape[1]) * z
  couple(refs, scores, block)
  _fixed_point(refs["u"], refs["coupling"], lambda x: directions(z - x), block)


def solve_transposed(
  refs: dict[str, Any],
  du: jax.Array,
  pull: Callable[[jax.Array], jax.Array],
  block: int,
) -> jax.Array:
  """Finds `dz`, `[tokens, slots]` in shared memory, and commits it.

  Args:
    refs: a place for `dz`; `coupling`, committed.
    du: the adjoint of u, but for what later tokens owe to it.
    pull: the adjoint of u -> of z.
    block: as in `solve`.

  Returns:
    The adjoint of u.
  """
  coupling = transposed(refs["coupling"])
  _fixed_point(refs["dz"], coupling, lambda found: pull(du - found), block)
  (found,) = products([(coupling, refs["dz"])])
  return du - found


def _fixed_point(
  ref: Any,
  coupling: Any,
  function: Callable[[jax.Array], jax.Array],
  block: int,
) -> None:
  """Finds x = function(coupling x), in `ref`."""

  def store(x: jax.Array) -> None:
    ref[...] = jnp.where(jnp.abs(x) < _LARGEST, x, 0.0).astype(ref.dtype)
    plgpu.commit_smem()

  def sweep(carry):
    swept, _ = carry
    (found,) = products([(coupling, ref)])
    new = function(found)
    low = new.astype(ref.dtype).astype(jnp.float32)
    moves = jnp.where(low == tile_kernel.wide(ref), 0.0, 1.0)
    moved = jnp.max(jnp.max(moves, axis=1))
    store(new)
    return swept + 1, moved

  def unfinished(carry):
    swept, moved = carry
    return (swept < full_tiles.TOKENS // block) & (moved > 0)

  zeros = jnp.zeros(ref.shape, jnp.float32)
  store(function(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)))
  _, moved = lax.while_loop(unfinished, sweep, (jnp.int32(0), jnp.float32(1)))

  def spoil():
    nan = jnp.full(ref.shape, jnp.nan, ref.dtype)
    ref[...] = plgpu.layout_cast(nan, plgpu.Layout.WGMMA)
    plgpu.commit_smem()

  lax.cond(moved > 0, spoil, lambda: None)
