"""Trellis's write directions per token on a GPU, exact: by sweeps.

Inside a tile, of the memory M before it and written keys or values w,

  z_t = mu_{t-1} M w_t - sum_{i<t} Omega_{t-1,i} (w_t . w_i) u_i,   u_t = g(z_t)

(`tile.py`; u has the write rate). All tokens at once, over and over: u <- g(z)
is a product on the matrix units and g of all rows. Row t does not move once
those before it do not, so that a tile of 64 tokens is exact after 63 sweeps
whatever g is, and often after a few: they end when no u moves, as the matrix
units take it. The adjoint is the same from the last token on, and linear:

  dz_t = J_t (du_t - sum_{s>t} Omega_{s-1,t} (w_s . w_t) dz_s)

Rows to come may overflow on the way, and zero times infinity would spoil rows
that are done: what is not finite counts as zero until the end. If by then
something is, all becomes nan, as nothing later would be finite either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.primitives.mosaic_gpu import full_tiles, gates
from memcomp_kernels.primitives.mosaic_gpu.products import (
  products,
  transposed,
)

_LARGEST = 3e38
"""What counts as finite: below bfloat16's largest number, as stored."""


def couple(refs: dict[str, Any], name: str, scores: jax.Array) -> None:
  """Stores what u_i is to z_t, with `scores` w_t . w_i."""
  scores = scores * between(refs, name)
  refs[f"coupling_{name}"][...] = scores.astype(refs[f"coupling_{name}"].dtype)


def between(refs: dict[str, Any], name: str) -> jax.Array:
  """Omega_{t-1,i}, zero from the diagonal on."""
  before = refs[f"before_{name}"], refs[f"since_{name}"]
  return gates.between(*before, strictly=True)


def from_start(refs: dict[str, Any], name: str, width: int) -> jax.Array:
  """mu_{t-1}, in `width` columns."""
  return jnp.exp(gates.along(refs[f"before_{name}"], 0, width))


def solve(
  refs: dict[str, Any],
  names: Sequence[str],
  directions: Callable[[str, jax.Array], jax.Array],
) -> None:
  """Finds `u_` of passes, `[tokens, slots]` in shared memory; commits it.

  Args:
    refs: of each pass the written vectors, its name, and their memory `low_`,
      both committed; places for `coupling_` and `u_`.
    names: of the passes.
    directions: (pass, z) -> u.
  """
  found = products(
    *([(refs[name], transposed(refs[f"low_{name}"]))] for name in names),
    *([(refs[name], transposed(refs[name]))] for name in names),
  )
  first = {}
  for i, name in enumerate(names):
    z = found[i]
    first[f"u_{name}"] = name, from_start(refs, name, z.shape[1]) * z
    couple(refs, name, found[len(names) + i])

  def function(key: str, product: jax.Array) -> jax.Array:
    name, z = first[key]
    return directions(name, z - product)

  couplings = {f"u_{name}": refs[f"coupling_{name}"] for name in names}
  _fixed_point(refs, couplings, function)


def solve_transposed(
  refs: dict[str, Any],
  name: str,
  du: jax.Array,
  pull: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """Finds dz of a pass, `[tokens, slots]` in shared memory, and commits it.

  Args:
    refs: references by name: `dz` and, committed, `coupling_` of the pass.
    name: the pass's.
    du: the adjoint of its u, but for what later tokens owe to it.
    pull: the adjoint of u -> of z.

  Returns:
    The adjoint of u.
  """
  coupling = transposed(refs[f"coupling_{name}"])
  _fixed_point(refs, {"dz": coupling}, lambda _, found: pull(du - found))
  (found,) = products([(coupling, refs["dz"])])
  return du - found


def _fixed_point(
  refs: dict[str, Any],
  couplings: dict[str, Any],
  function: Callable[[str, jax.Array], jax.Array],
) -> None:
  """Finds x = function(name, coupling x) of all names, in refs."""
  names: Sequence[str] = list(couplings)

  def store(name: str, x: jax.Array) -> None:
    ref = refs[name]
    ref[...] = jnp.where(jnp.abs(x) < _LARGEST, x, 0.0).astype(ref.dtype)

  def sweep(carry):
    swept, _ = carry
    found = products(*([(couplings[name], refs[name])] for name in names))
    moved = 0.0
    for name, product in zip(names, found, strict=True):
      new = function(name, product)
      old = plgpu.load(refs[name], layout=plgpu.Layout.WGMMA)
      low = new.astype(refs[name].dtype).astype(jnp.float32)
      moves = jnp.where(low == old.astype(jnp.float32), 0.0, 1.0)
      moved = jnp.maximum(moved, jnp.max(jnp.max(moves, axis=1)))
      store(name, new)
    plgpu.commit_smem()
    return swept + 1, moved

  def unfinished(carry):
    swept, moved = carry
    return (swept < full_tiles.TOKENS) & (moved > 0)

  for name in names:
    shape = refs[name].shape
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    store(name, function(name, zeros))
  plgpu.commit_smem()
  _, moved = lax.while_loop(unfinished, sweep, (jnp.int32(0), jnp.float32(1)))

  def spoil():
    for name in names:
      ref = refs[name]
      nan = jnp.full(ref.shape, jnp.nan, ref.dtype)
      ref[...] = plgpu.layout_cast(nan, plgpu.Layout.WGMMA)
    plgpu.commit_smem()

  lax.cond(moved > 0, spoil, lambda: None)
