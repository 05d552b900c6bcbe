"""Trellis's exact write directions per token on a GPU, by repeated sweeps.

Within a tile, M is the memory before it, w are the written keys or values, and
u includes the write rate (see `trellis.tile`):

  z_t = mu_{t-1} M w_t - sum_{i<t} Omega_{t-1,i} (w_t . w_i) u_i,   u_t = g(z_t)

A sweep u <- g(z) updates all tokens at once: it is one matmul, and g of all
rows. Row t no longer changes once the rows before it do not. So a tile of 64
tokens is exact after 63 sweeps for any g, and often after a few. The sweeps end
when no u changes in the dtype of the matmul's operands. The adjoint is the same
loop from the last token to the first, and it is linear:

  dz_t = J_t (du_t - sum_{s>t} Omega_{s-1,t} (w_s . w_t) dz_s)

Chunks shorter than a tile form such a system of blocks. All tokens of a chunk
share the memory before it, so z_t has Omega_{b-1,i} and only the u of earlier
chunks, where b is the chunk's first token. Four chunks of 16 are exact after
three sweeps, and the fourth sweep finds that nothing changes.

Later rows may overflow during the sweeps, and zero times infinity would spoil
finished rows. So values that are not finite count as zero until the end. If
rows still change after the last sweep, the result has values that are not
finite. All of it then becomes NaN, as later results would not be finite either.
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
"""Bound of values that count as finite, below the largest bfloat16 (stored)."""


def couple(refs: dict[str, Any], scores: jax.Array, block: int) -> None:
  """Stores the factors of u_i in z_t in `coupling`; `scores` are w_t . w_i."""
  scores = scores * between(refs, block)
  refs["coupling"][...] = scores.astype(refs["coupling"].dtype)


def between(refs: dict[str, Any], block: int) -> jax.Array:
  """Returns Omega_{t-1,i}, zero from the diagonal on.

  For blocks, it returns Omega_{b-1,i}.
  """
  return gates.between(refs["before"], refs["since"], block=block)


def from_start(refs: dict[str, Any], width: int) -> jax.Array:
  """Returns mu_{t-1} (for blocks, mu_{b-1}) in `width` columns."""
  return jnp.exp(gates.along(refs["before"], 0, width))


def solve(
  refs: dict[str, Any],
  memory: Any,
  directions: Callable[[jax.Array], jax.Array],
  block: int,
) -> None:
  """Computes `u`, `[tokens, slots]` in shared memory, and commits it.

  Args:
    refs: References: `written`, committed, and the results `coupling` and `u`.
    memory: Reference to the memory before the tile, committed.
    directions: Maps z to u.
    block: Number of tokens whose gradients are taken at the same memory, a
      power of 2.
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
  """Computes `dz`, `[tokens, slots]` in shared memory, and commits it.

  Args:
    refs: References: `coupling`, committed, and the result `dz`.
    du: Adjoint of u, without the part through later tokens.
    pull: Maps the adjoint of u to the adjoint of z.
    block: Tokens per block; see `solve`.

  Returns:
    The whole adjoint of u.
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
  """Solves x = function(coupling x); x is in `ref`."""

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
