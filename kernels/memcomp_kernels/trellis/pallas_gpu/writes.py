"""Trellis's writes as a Pallas GPU kernel, tile after tile.

Neither pass's writes wait for the other's, nor any write for a read: a block of
threads has one pass of one head, and leaves what reads start from
(`reads`), the memory before each tile and what each token writes. So the
chain from tile to tile is two products long. The algebra is that of `tile.py`,
with stale gradients a tile a chunk; rates are taken into the directions. "With
gradients per token" is here for blocks of `spec.chunk_size` tokens: 1, or the
chunks of which a tile has several (`sweeps`).
"""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.pallas_gpu import (
  full_tiles,
  gates,
  rows,
  starts,
  tile_kernel,
)
from memcomp_kernels.pallas_gpu.products import products, transposed
from memcomp_kernels.trellis import reference
from memcomp_kernels.trellis.pallas_gpu import sweeps

NAME = "memory"
SLOTS = 64, 128
DIMS = 64, 128
"""Of keys and values."""
LARGEST = 64 * 128
"""Slots times dims: what shared memory has room for."""


def gate_kinds(spec: reference.Spec) -> tuple[str, ...]:
  """What `gates` of writes hold, by token.

  Rates, and what reaches the tile's end; with gradients per token also sums of
  log decays from the tile's start, up to the token (or the chunk) before and
  with its own.
  """
  return ("rate", "to_end") + (() if spec.stale else ("before", "since"))


def direct(
  refs: dict[str, Any], spec: reference.Spec, z: jax.Array, rate: Any
) -> jax.Array:
  """Directions with rates, float32.

  Args:
    refs: `target` among them, read here.
    spec: the memory's meaning.
    z: what they are taken at.
    rate: reference to the tokens' rates.
  """
  target = tile_kernel.wide(refs["target"])
  u = rows.write_direction(spec.phi, z, target, spec.phi_eps)
  return u * gates.along(rate, 0, u.shape[1])


def _body(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
  spec: reference.Spec,
) -> tile_kernel.Carry:
  """One tile; see `forward`."""
  refs = refs | gates.parts(refs["gates"], gate_kinds(spec))
  dtype = refs["written"].dtype
  memory = starts.reset(refs, scalars, NAME, carry[0])
  refs["saved"][...] = memory.astype(dtype)
  at = refs["saved"]
  if "continues" in scalars:
    at = refs["at"]
    at[...] = starts.enter(refs, scalars, NAME, memory).astype(dtype)
  plgpu.commit_smem()
  if spec.stale:
    (z,) = products([(refs["written"], transposed(at))])
    u = direct(refs, spec, z, refs["rate"])
    refs["u"][...] = u.astype(dtype)
  else:
    sweeps.solve(
      refs,
      at,
      lambda z: direct(refs, spec, z, refs["rate"]),
      spec.chunk_size,
    )
    u = tile_kernel.wide(refs["u"])
  u_end = u * gates.along(refs["to_end"], 0, u.shape[1])
  refs["u_end"][...] = u_end.astype(dtype)
  plgpu.commit_smem()
  (written,) = products([(transposed(refs["u_end"]), refs["written"])])
  return (scalars["total"] * memory - written,)


def forward(
  operands: dict[str, jax.Array], spec: reference.Spec
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: by tile `written` `[tiles, batch, 2 * heads, tile, width]`, keys
      and values of each head; `target` `[tiles, batch, heads, tile, slots]`;
      float32 `gates` `[tiles, batch, 2 * heads, kinds * tile]`, see
      `gate_kinds`, and the tile's whole decay `total` `[tiles, batch,
      2 * heads]`; `memory` `[batch, 2 * heads, slots, width]`. Where segments
      are told apart also int32 `[tiles, batch]` `resets` and `reset_memory`;
      where chunks under way are, `continues`, `last` (the row's last chunk) and
      `start_memory`.
    spec: the memory's meaning.

  Returns:
    By tile, in the dtype of what is written: memories before each, `saved`, and
    directions with rates, `u` `[tiles, batch, 2 * heads, tile, slots]`; the
    memory `final`; with `last` that at the last chunk's start, `last_memory`.
  """
  written, memory = operands["written"], operands["memory"]
  num_tiles, _, lanes, tile = written.shape[:4]
  dtype = written.dtype
  slots = memory.shape[2]
  u = jax.ShapeDtypeStruct((*written.shape[:4], slots), dtype)
  of_u = jax.ShapeDtypeStruct((tile, slots), dtype)
  local = {"u_end": of_u}
  final = jax.ShapeDtypeStruct(memory.shape, memory.dtype)
  results = {
    "saved": jax.ShapeDtypeStruct((num_tiles, *memory.shape), dtype),
    "u": u,
    "final": final,
  }
  if not spec.stale:
    local["coupling"] = jax.ShapeDtypeStruct((full_tiles.TOKENS,) * 2, dtype)
  if "last" in operands:
    local["at"] = jax.ShapeDtypeStruct(memory.shape[2:], dtype)
    results["last_memory"] = final
  return tile_kernel.run(
    lambda refs, scalars, carry: _body(refs, scalars, carry, spec),
    "trellis_writes",
    operands,
    results,
    heads=lanes,
    local=local,
    memories=[NAME, "final", *(f"{kind}_{NAME}" for kind in starts.KINDS)],
    carried=[(NAME, "final")],
  )
