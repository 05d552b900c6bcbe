"""Trellis with stale gradients as a Pallas GPU kernel, forward: both passes.

The algebra is that of `tile.py`, a tile a chunk; memories stay in registers
from chunk to chunk. Decay is by differences of sums of logs, which cannot
overflow.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.primitives.mosaic_gpu import rows, tile_kernel
from memcomp_kernels.primitives.mosaic_gpu.products import (
  products,
  transposed,
)
from memcomp_kernels.trellis import types

TOKENS = 64
"""Of a chunk: rows of a matrix unit's product. Shorter chunks are filled up."""
WIDTHS = (64,)
"""Of keys and values, and slots: what shared memory has room for."""


def _vector(ref: Any, axis: int, width: int) -> jax.Array:
  """Numbers of tokens `[tokens]` along an axis of `[tokens, width]`."""
  layout = plgpu.Layout.WGMMA.reduce(1 - axis)
  x = plgpu.load(ref, layout=layout, optimized=False)
  shape = (TOKENS, width) if axis == 0 else (width, TOKENS)
  return lax.broadcast_in_dim(x, shape, (axis,))


def _weights(refs: dict[str, Any], gate: str) -> jax.Array:
  """Omega diag(g), `[tokens, tokens]`: zero above the diagonal."""
  row, column = (
    plgpu.broadcasted_iota(
      jnp.int32, (TOKENS, TOKENS), axis, layout=plgpu.Layout.WGMMA
    )
    for axis in (0, 1)
  )
  log = _vector(refs[f"log{gate}"], 0, TOKENS)
  # The same reference in two layouts is one load to the compiler, and none.
  since = _vector(refs[f"since{gate}"], 1, TOKENS)
  decay = jnp.exp(jnp.minimum(log - since, 0.0))
  rate = _vector(refs[f"rate{gate}"], 1, TOKENS)
  return jnp.where(row >= column, decay * rate, 0.0)


def body(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  carry: tile_kernel.Carry,
  spec: types.Spec,
) -> tile_kernel.Carry:
  """One chunk; see `forward`."""
  memories = list(carry)
  names = "key", "value"
  if "resets" in scalars:
    memories = [
      lax.cond(
        scalars["resets"] != 0,
        lambda _, name=name: tile_kernel.load(refs[f"reset_{name}"]),
        lambda memory: memory,
        memory,
      )
      for name, memory in zip(names, memories, strict=True)
    ]
  dtype = refs["key"].dtype
  starts = []
  for name, memory in zip(names, memories, strict=True):
    refs[f"saved_{name}"][...] = memory
    refs[f"low_{name}"][...] = memory.astype(dtype)
    start = memory
    if "continues" in scalars:
      start = lax.cond(
        scalars["continues"] != 0,
        lambda _, name=name: tile_kernel.load(refs[f"start_{name}"]),
        lambda memory: memory,
        memory,
      )
      _store_if(scalars["last"], refs[f"last_{name}"], start)
    refs[f"start_low_{name}"][...] = start.astype(dtype)
    starts.append(start)
  plgpu.commit_smem()
  z_key, z_value, read, scores = products(
    [(refs["key"], transposed(refs["start_low_key"]))],
    [(refs["value"], transposed(refs["start_low_value"]))],
    [(refs["query"], transposed(refs["low_key"]))],
    [(refs["query"], transposed(refs["key"]))],
  )
  target = plgpu.load(refs["target"], layout=plgpu.Layout.WGMMA)
  target = target.astype(jnp.float32)
  for name, z, gate in (("key", z_key, "0"), ("value", z_value, "1")):
    u = rows.write_direction(spec.phi, z, target, spec.phi_eps)
    refs[f"u_{name}"][...] = u.astype(dtype)
    to_end = _vector(refs[f"to_end{gate}"], 0, u.shape[1])
    refs[f"u_end_{name}"][...] = (u * to_end).astype(dtype)
  refs["scores"][...] = (scores * _weights(refs, "0")).astype(dtype)
  plgpu.commit_smem()
  (found,) = products([(refs["scores"], refs["u_key"])])
  read = _vector(refs["from_start0"], 0, read.shape[1]) * read - found
  code = rows.activate(spec.read_activation, read, spec.read_eps)
  refs["code"][...] = code.astype(dtype)
  plgpu.commit_smem()
  scores, output = products(
    [(refs["code"], transposed(refs["u_value"]))],
    [(refs["code"], refs["low_value"])],
  )
  refs["scores"][...] = (scores * _weights(refs, "1")).astype(dtype)
  plgpu.commit_smem()
  found, *written = products(
    [(refs["scores"], refs["value"])],
    *([(transposed(refs[f"u_end_{x}"]), refs[x])] for x in names),
  )
  output = _vector(refs["from_start1"], 0, output.shape[1]) * output - found
  refs["output"][...] = output.astype(refs["output"].dtype)
  return tuple(
    scalars[f"total{gate}"] * memory - x
    for gate, memory, x in zip("01", memories, written, strict=True)
  )


def _store_if(flag: jax.Array, ref: Any, value: jax.Array) -> None:
  def store():
    ref[...] = value

  lax.cond(flag != 0, store, lambda: None)


def forward(
  operands: dict[str, jax.Array], spec: types.Spec
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: by tile `[tiles, batch, heads, tile, width]`: `query`, `key`,
      `value`, `target`; `[tiles, batch, heads, tile]`, float32, of the gates
      of both passes: `log0`, `log1` (sums of log decays from the tile's start),
      `since0` and `since1` (the same), `rate0`, `rate1`, `from_start0`,
      `from_start1`, `to_end0` and `to_end1` (times the rates); `[tiles, batch,
      heads]`: `total0`, `total1`; memories
      `memory_key`, `memory_value`. Where segments or chunks under way are told
      apart also int32 `[tiles, batch]` `resets`, `continues` and `last` (the
      row's last chunk), and memories `reset_` and `start_`, each of both.
    spec: the memory's meaning.

  Returns:
    `output`, of `value`'s shape and dtype; `final_key` and `final_value`;
    `saved_key` and `saved_value`, before each tile; with `last` the memories at
    that chunk's start, `last_key` and `last_value`.
  """
  value, target = operands["value"], operands["target"]
  num_tiles, _, heads = value.shape[:3]
  names = "key", "value"
  dtype = value.dtype
  local = {
    "scores": jax.ShapeDtypeStruct((TOKENS, TOKENS), dtype),
    "code": jax.ShapeDtypeStruct(target.shape[3:], dtype),
  }
  results = {"output": jax.ShapeDtypeStruct(value.shape, dtype)}
  kinds = ["memory", "final"]
  for name in names:
    memory = operands[f"memory_{name}"]
    results[f"final_{name}"] = jax.ShapeDtypeStruct(memory.shape, memory.dtype)
    results[f"saved_{name}"] = jax.ShapeDtypeStruct(
      (num_tiles, *memory.shape), memory.dtype
    )
    for kind in ("low", "start_low"):
      local[f"{kind}_{name}"] = jax.ShapeDtypeStruct(memory.shape[2:], dtype)
    for kind in ("u", "u_end"):
      local[f"{kind}_{name}"] = local["code"]
    if "last" in operands:
      kinds += ["reset", "start", "last"]
      results[f"last_{name}"] = results[f"final_{name}"]

  return tile_kernel.run(
    lambda refs, scalars, carry: body(refs, scalars, carry, spec),
    "trellis_forward",
    operands,
    results,
    heads=heads,
    memories=[
      f"{kind}_{name}" for kind in dict.fromkeys(kinds) for name in names
    ],
    carried=[(f"memory_{name}", f"final_{name}") for name in names],
    local=local,
  )
