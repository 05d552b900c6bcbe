"""Trellis's writes as a Pallas GPU kernel, tile after tile.

The writes of one pass do not depend on the other pass, and no write depends on
a read. So each thread block has one pass of one head. It stores what reads
start from (`reads`): the memory before each tile and each token's direction.
The chain from tile to tile is therefore only two matmuls long. The algebra is
that of `trellis.tile`. Directions include the rates.

With gradients at the chunk's start, a tile is a chunk, or has several. In this
folder, "gradients per token" also means per block of a tile: see
`tiles.block_of`.
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
"""Supported widths of keys and values."""
LARGEST = 64 * 128
"""Largest product of slots and width for which shared memory has room."""


def gate_kinds(block: int | None) -> tuple[str, ...]:
  """Names of the parts of the writes' `gates`, by token.

  These are the rates, and the decay to the tile's end. With gradients per
  token, there are also sums of log decays from the tile's start. One sum ends
  before the token (or its chunk), the other includes the token's own decay.
  """
  return ("rate", "to_end") + (() if block is None else ("before", "since"))


def direct(
  refs: dict[str, Any], spec: reference.Spec, z: jax.Array, rate: Any
) -> jax.Array:
  """Returns directions multiplied by rates, float32.

  Args:
    refs: References; this function reads `target`.
    spec: Options that define the memory.
    z: Pre-activations at which the directions are taken.
    rate: Reference to the tokens' rates.
  """
  target = tile_kernel.wide(refs["target"])
  u = rows.write_direction(spec.phi, z, target, spec.phi_eps)
  return u * gates.along(rate, 0, u.shape[1])


def _body(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
  spec: reference.Spec,
  block: int | None,
) -> tile_kernel.Carry:
  """Computes one tile; see `forward`."""
  refs = refs | gates.parts(refs["gates"], gate_kinds(block))
  dtype = refs["written"].dtype
  memory = starts.reset(refs, scalars, NAME, carry[0])
  refs["saved"][...] = memory.astype(dtype)
  at = refs["saved"]
  if "continues" in scalars:
    at = refs["at"]
    at[...] = starts.enter(refs, scalars, NAME, memory).astype(dtype)
  plgpu.commit_smem()
  if block is None:
    (z,) = products([(refs["written"], transposed(at))])
    u = direct(refs, spec, z, refs["rate"])
    refs["u"][...] = u.astype(dtype)
  else:
    sweeps.solve(
      refs,
      at,
      lambda z: direct(refs, spec, z, refs["rate"]),
      block,
    )
    u = tile_kernel.wide(refs["u"])
  u_end = u * gates.along(refs["to_end"], 0, u.shape[1])
  refs["u_end"][...] = u_end.astype(dtype)
  plgpu.commit_smem()
  (written,) = products([(transposed(refs["u_end"]), refs["written"])])
  return (scalars["total"] * memory - written,)


def forward(
  operands: dict[str, jax.Array], spec: reference.Spec, block: int | None
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: Arrays by name. `written` `[tiles, batch, 2 * heads, tile, width]`
      are the keys and values of each head. `target` is `[tiles, batch, heads,
      tile, slots]`. `gates` is float32 `[tiles, batch, 2 * heads, kinds *
      tile]`; see `gate_kinds`. `total` is a tile's whole decay, float32
      `[tiles, batch, 2 * heads]`. `memory` is `[batch, 2 * heads, slots,
      width]`. If there are several segments, `resets` is int32 `[tiles, batch]`
      and `reset_memory` is shaped as `memory`. If chunks may have begun before
      the call, there are also `continues`, `last` (the row's last chunk) and
      `start_memory`.
    spec: Options that define the memory.
    block: Result of `tiles.block_of`.

  Returns:
    Arrays by name. `saved` are the memories before each tile and `u` the
    directions with rates, `[tiles, batch, 2 * heads, tile, slots]`. Both have
    the dtype of `written`. `final` is the memory after the last tile. With
    `last`, `last_memory` is the memory at the last chunk's start.
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
  if block is not None:
    local["coupling"] = jax.ShapeDtypeStruct((full_tiles.TOKENS,) * 2, dtype)
  if "last" in operands:
    local["at"] = jax.ShapeDtypeStruct(memory.shape[2:], dtype)
    results["last_memory"] = final
  return tile_kernel.run(
    lambda refs, scalars, carry: _body(refs, scalars, carry, spec, block),
    "trellis_writes",
    operands,
    results,
    heads=lanes,
    local=local,
    memories=[NAME, "final", *(f"{kind}_{NAME}" for kind in starts.KINDS)],
    carried=[(NAME, "final")],
  )
