"""Trellis with stale gradients as a Pallas GPU kernel, forward: both passes.

The algebra is that of `tile.py`, a tile a chunk; memories stay in registers
from chunk to chunk. Rates are taken into the directions.
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
from memcomp_kernels.trellis import types

NAMES = "key", "value"
"""Of the passes."""
GATES = "log", "since", "rate", "to_end"
"""Of each pass, by token: sums of log decays from the chunk's start, a copy of
them, rates, and what reaches the chunk's end."""
WIDTHS = (64,)
"""Of keys and values, and slots: what shared memory has room for."""


def body(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
  spec: types.Spec,
) -> tile_kernel.Carry:
  """One chunk; see `forward`."""
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
    start = starts.enter(refs, scalars, name, memory)
    refs[f"start_low_{name}"][...] = start.astype(dtype)
  plgpu.commit_smem()
  z_key, z_value, read, scores = products(
    [(refs["key"], transposed(refs["start_low_key"]))],
    [(refs["value"], transposed(refs["start_low_value"]))],
    [(refs["query"], transposed(refs["low_key"]))],
    [(refs["query"], transposed(refs["key"]))],
  )
  target = plgpu.load(refs["target"], layout=plgpu.Layout.WGMMA)
  target = target.astype(jnp.float32)
  for name, z in (("key", z_key), ("value", z_value)):
    u = rows.write_direction(spec.phi, z, target, spec.phi_eps)
    u = u * gates.along(refs[f"rate_{name}"], 0, u.shape[1])
    refs[f"u_{name}"][...] = u.astype(dtype)
    u = u * gates.along(refs[f"to_end_{name}"], 0, u.shape[1])
    refs[f"u_end_{name}"][...] = u.astype(dtype)
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
      `[tiles, batch, heads, GATES * tile]`, the chunk's whole decay `total_`
      `[tiles, batch, heads]` and memories `memory_`. Where segments or chunks
      under way are told apart also int32 `[tiles, batch]` `resets`, `continues`
      and `last` (the row's last chunk), and memories `reset_` and `start_`.
    spec: the memory's meaning.
    save: whether to return the memories before each tile.

  Returns:
    `output`, of `value`'s shape and dtype; `final_key` and `final_value`;
    with `save` also `saved_key` and `saved_value`, in the same dtype; with
    `last` the memories at that chunk's start, `last_key` and `last_value`.
  """
  value, target = operands["value"], operands["target"]
  num_tiles, _, heads = value.shape[:3]
  dtype = value.dtype
  local = {
    "scores": jax.ShapeDtypeStruct((full_tiles.TOKENS,) * 2, dtype),
    "code": jax.ShapeDtypeStruct(target.shape[3:], dtype),
  }
  results = {"output": jax.ShapeDtypeStruct(value.shape, dtype)}
  kinds = ["memory", "final"]
  for name in NAMES:
    memory = operands[f"memory_{name}"]
    results[f"final_{name}"] = jax.ShapeDtypeStruct(memory.shape, memory.dtype)
    if save:
      results[f"saved_{name}"] = jax.ShapeDtypeStruct(
        (num_tiles, *memory.shape), dtype
      )
    for kind in ("low", "start_low"):
      local[f"{kind}_{name}"] = jax.ShapeDtypeStruct(memory.shape[2:], dtype)
    for kind in ("u", "u_end"):
      local[f"{kind}_{name}"] = local["code"]
    if "last" in operands:
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
  )
