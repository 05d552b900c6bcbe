"""Lattice with gradients at the chunk's start as a Pallas GPU kernel, forward.

A tile is a chunk (see `chunk`). The memory stays in registers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.lattice import reference
from memcomp_kernels.lattice.pallas_gpu import chunk
from memcomp_kernels.pallas_gpu import full_tiles, starts, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed

NAME = "memory"


class _Chunk(chunk.Chunk):
  """Computes one chunk forward; see `forward`."""

  def run(self, carry: tile_kernel.Carry) -> tile_kernel.Carry:
    refs, scalars = self.refs, self.scalars
    memory = starts.reset(refs, scalars, NAME, carry[0])
    self.store("low", memory)
    if "saved" in refs:
      self.store("saved", memory)
    start = starts.enter(refs, scalars, NAME, memory)
    phi = refs["low"]
    if self.flagged:
      self.store("phi", start)
      phi = refs["phi"]
    plgpu.commit_smem()
    self.find(phi)
    refs["lowest"][...] = self.lowest
    self.lay()
    ratio = self.ratio()
    scores, output, written = products(
      [(refs["late"], transposed(refs["early"]))],
      [(refs["late"], refs["low"])],
      [(transposed(refs["left"]), refs["value"])],
    )
    self.store("scores", jnp.where(chunk.triangle(scores), scores, 0.0))
    self.store("late", self.late() * ratio)
    plgpu.commit_smem()
    found, along = products(
      [(refs["scores"], refs["value"])], [(refs["late"], phi)]
    )
    self.store("output", output + found - along)

    after = self.after(memory, start, written)
    inverse, sized = chunk.norms(after, self.complete)
    return (jnp.where(sized, inverse * after, start),)


def local(
  operands: dict[str, jax.Array], flagged: bool
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of a chunk's arrays in shared memory."""
  value, dtype = operands["value"].shape[3:], operands["value"].dtype
  (slots,) = chunk.SLOTS
  square = jax.ShapeDtypeStruct((full_tiles.TOKENS, slots), dtype)
  by_slot = jax.ShapeDtypeStruct((slots,), jnp.float32)
  found = dict.fromkeys(chunk.LOW, square)
  found |= dict.fromkeys(chunk.WIDE, by_slot)
  kept = jax.ShapeDtypeStruct((full_tiles.TOKENS, slots), jnp.float32)
  found |= dict.fromkeys(chunk.KEPT, kept)
  found["low"] = jax.ShapeDtypeStruct((slots, value[-1]), dtype)
  return found | {"phi": found["low"]} if flagged else found


def forward(
  operands: dict[str, Any], spec: reference.Spec, save: bool
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: Arrays by name. By tile, `[tiles, batch, heads, tile, width]`, are
      `query`, `key` (over slots) and `value`. Float32 `[tiles, batch, heads,
      tile]` are `log_decay` and `rate`. `memory` is `[batch, heads, slots,
      value]`. If there are several segments, or chunks that began before the
      call, there are also `full_tiles.flags` and the memories `reset_memory`
      and `start_memory`.
    spec: Options that define the memory.
    save: Whether to return the memories before each tile.

  Returns:
    Arrays by name. `output` has the shape and dtype of `value`. `final` is the
    memory after the last tile. `lowest` are sums of log decays, `[tiles, batch,
    heads, slots]`; below `form.LOWEST_SUM`, all results are invalid. With
    `save`, `saved` has the dtype of values. With flags, `last_memory` is the
    memory at the last chunk's start.
  """
  value, memory = operands["value"], operands["memory"]
  flagged = "resets" in operands
  lowest = *value.shape[:3], memory.shape[2]
  results = {
    "output": jax.ShapeDtypeStruct(value.shape, value.dtype),
    "lowest": jax.ShapeDtypeStruct(lowest, jnp.float32),
    "final": jax.ShapeDtypeStruct(memory.shape, memory.dtype),
  }
  names = ["memory", "final"]
  if save:
    saved = value.shape[0], *memory.shape
    results["saved"] = jax.ShapeDtypeStruct(saved, value.dtype)
  if flagged:
    names += [f"{kind}_{NAME}" for kind in starts.KINDS]
    results[f"last_{NAME}"] = results["final"]
  return tile_kernel.run(
    lambda refs, scalars, carry: _Chunk(refs, scalars, spec).run(carry),
    "lattice_forward",
    operands,
    results,
    heads=value.shape[2],
    memories=names,
    carried=[("memory", "final")],
    local=local(operands, flagged),
    in_place={"output": "value"},
  )
