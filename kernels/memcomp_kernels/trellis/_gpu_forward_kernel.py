"""Trellis as a Pallas GPU kernel, forward: both passes.

The algebra is that of `tile.py`, with stale gradients a tile a chunk; memories
stay in registers from tile to tile. Rates are taken into the directions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.primitives.mosaic_gpu import (
  full_tiles,
  gates,
  rows,
  starts,
  tile_kernel,
)
from memcomp_kernels.primitives.mosaic_gpu.products import (
  products,
  transposed,
)
from memcomp_kernels.trellis import _gpu_sweeps, types

NAMES = "key", "value"
"""Of the passes."""
GATES = "log", "since", "rate", "to_end"
"""Of each pass, by token: sums of log decays from the chunk's start, a copy of
them, rates, and what reaches the chunk's end."""
SLOTS = (64,)
DIMS = 64, 128
"""Of keys and values: what shared memory has room for."""


def body(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
  spec: types.Spec,
) -> tile_kernel.Carry:
  """One tile; see `forward`."""
  refs = refs | gates.parts(refs, "gates", GATES)
  memories = [
    starts.reset(refs, scalars, name, memory)
    for name, memory in zip(NAMES, carry, strict=True)
  ]
  dtype = refs["key"].dtype
  for name, memory in zip(NAMES, memories, strict=True):
    refs[f"low_{name}"][...] = memory.astype(dtype)
    if f"saved_{name}" in refs:
      refs[f"saved_{name}"][...] = memory.astype(dtype)
    if "continues" in scalars:
      start = starts.enter(refs, scalars, name, memory)
      refs[f"at_{name}"][...] = start.astype(dtype)
    else:
      refs[f"at_{name}"] = refs[f"low_{name}"]
  plgpu.commit_smem()

  def direct(name: str, z: jax.Array) -> jax.Array:
    target = tile_kernel.wide(refs["target"])
    u = rows.write_direction(spec.phi, z, target, spec.phi_eps)
    return u * gates.along(refs[f"rate_{name}"], 0, u.shape[1])

  asked = [
    [(refs["query"], transposed(refs["low_key"]))],
    [(refs["query"], transposed(refs["key"]))],
  ]
  if spec.stale:
    *z, read, scores = products(
      *([(refs[x], transposed(refs[f"at_{x}"]))] for x in NAMES), *asked
    )
    u = [direct(*each) for each in zip(NAMES, z, strict=True)]
    for name, u_pass in zip(NAMES, u, strict=True):
      refs[f"u_{name}"][...] = u_pass.astype(dtype)
  else:
    _gpu_sweeps.solve(refs, NAMES, direct)
    u = [tile_kernel.wide(refs[f"u_{name}"]) for name in NAMES]
    read, scores = products(*asked)
  for name, u_pass in zip(NAMES, u, strict=True):
    if f"saved_u_{name}" in refs:
      refs[f"saved_u_{name}"][...] = u_pass.astype(dtype)
    u_end = u_pass * gates.along(refs[f"to_end_{name}"], 0, u_pass.shape[1])
    refs[f"u_end_{name}"][...] = u_end.astype(dtype)
  scores = scores * gates.between(refs["log_key"], refs["since_key"])
  refs["scores"][...] = scores.astype(dtype)
  plgpu.commit_smem()
  (found,) = products([(refs["scores"], refs["u_key"])])
  from_start = jnp.exp(gates.along(refs["log_key"], 0, read.shape[1]))
  code = rows.activate(
    spec.read_activation, from_start * read - found, spec.read_eps
  )
  refs["code"][...] = code.astype(dtype)
  plgpu.commit_smem()
  scores, output = products(
    [(refs["code"], transposed(refs["u_value"]))],
    [(refs["code"], refs["low_value"])],
  )
  scores = scores * gates.between(refs["log_value"], refs["since_value"])
  refs["scores"][...] = scores.astype(dtype)
  plgpu.commit_smem()
  found, *written = products(
    [(refs["scores"], refs["value"])],
    *([(transposed(refs[f"u_end_{x}"]), refs[x])] for x in NAMES),
  )
  from_start = jnp.exp(gates.along(refs["log_value"], 0, output.shape[1]))
  output = from_start * output - found
  refs["output"][...] = output.astype(refs["output"].dtype)
  return tuple(
    scalars[f"total_{name}"] * memory - x
    for name, memory, x in zip(NAMES, memories, written, strict=True)
  )


def forward(
  operands: dict[str, jax.Array], spec: types.Spec, save: bool
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: by tile `[tiles, batch, heads, tile, width]`: `query`, `key`,
      `value`, `target`; of each pass, `_key` and `_value`, float32 `gates_`
      `[tiles, batch, heads, GATES * tile]`, the tile's whole decay `total_`
      `[tiles, batch, heads]` and memories `memory_`; with gradients per token
      also `before_` `[tiles, batch, heads, tile]`, sums of log decays up to the
      token before. Where segments are told apart also int32 `[tiles, batch]`
      `resets` and memories `reset_`; where chunks under way are, `continues`,
      `last` (the row's last chunk) and memories `start_`.
    spec: the memory's meaning.
    save: whether to return what backward starts from.

  Returns:
    `output`, of `value`'s shape and dtype; `final_key` and `final_value`;
    with `save` also the memories before each tile, `saved_key` and
    `saved_value`, in the same dtype, and with gradients per token the
    directions, `saved_u_key` and `saved_u_value`, as the targets; with `last`
    the memories at that chunk's start, `last_key` and `last_value`.
  """
  value, target = operands["value"], operands["target"]
  num_tiles, _, heads = value.shape[:3]
  dtype = value.dtype
  square = jax.ShapeDtypeStruct((full_tiles.TOKENS,) * 2, dtype)
  code = jax.ShapeDtypeStruct(target.shape[3:], dtype)
  local = {"scores": square, "code": code}
  results = {"output": jax.ShapeDtypeStruct(value.shape, dtype)}
  kinds = ["memory", "final"]
  if "resets" in operands:
    kinds.append("reset")
  for name in NAMES:
    memory = operands[f"memory_{name}"]
    results[f"final_{name}"] = jax.ShapeDtypeStruct(memory.shape, memory.dtype)
    local |= {f"u_{name}": code, f"u_end_{name}": code}
    low = local[f"low_{name}"] = jax.ShapeDtypeStruct(memory.shape[2:], dtype)
    if save:
      results[f"saved_{name}"] = jax.ShapeDtypeStruct(
        (num_tiles, *memory.shape), dtype
      )
    if not spec.stale:
      local[f"coupling_{name}"] = square
      if save:
        results[f"saved_u_{name}"] = jax.ShapeDtypeStruct(target.shape, dtype)
    if "last" in operands:
      local[f"at_{name}"] = low
      kinds += starts.KINDS
      results[f"last_{name}"] = results[f"final_{name}"]

  return tile_kernel.run(
    lambda refs, scalars, carry: body(refs, scalars, carry, spec),
    "trellis_forward",
    operands,
    results,
    heads=heads,
    memories=[
      f"{kind}_{name}" for kind in dict.fromkeys(kinds) for name in NAMES
    ],
    carried=[(f"memory_{name}", f"final_{name}") for name in NAMES],
    local=local,
    in_place={"output": "value"},
  )
