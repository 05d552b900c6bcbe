"""Trellis's reads as a Pallas GPU kernel, with all tiles in parallel.

The kernel uses what `writes` stored: the memory before each tile and the
directions of its tokens. Given both, reads are matmuls (`trellis.tile`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.pallas_gpu import full_tiles, gates, rows, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed
from memcomp_kernels.trellis import reference

PASSES = "key", "value"
"""Names of the passes. In an array of both, pass 1's rows come first."""
GATES = "log_key", "since_key", "log_value", "since_value"
"""Parts of the reads' `gates`, by token. Each pass has the sums of log decays
from the tile's start, and a copy of these sums."""


def between(refs: dict[str, Any], name: str) -> jax.Array:
  """Returns Omega of a pass."""
  return gates.between(refs[f"log_{name}"], refs[f"since_{name}"])


def from_start(refs: dict[str, Any], name: str, width: int) -> jax.Array:
  """Returns mu of a pass, in `width` columns."""
  return jnp.exp(gates.along(refs[f"log_{name}"], 0, width))


def _body(refs, scalars, carry, spec: reference.Spec):
  """Computes one tile; see `forward`."""
  del scalars
  refs = refs | gates.parts(refs["gates"], GATES)
  saved, u, written = (
    gates.parts(refs[name], PASSES) for name in ("saved", "u", "written")
  )
  dtype = refs["query"].dtype
  read, scores = products(
    [(refs["query"], transposed(saved["key"]))],
    [(refs["query"], transposed(written["key"]))],
  )
  refs["scores"][...] = (scores * between(refs, "key")).astype(dtype)
  plgpu.commit_smem()
  (found,) = products([(refs["scores"], u["key"])])
  read = from_start(refs, "key", read.shape[1]) * read - found
  code = rows.activate(spec.read_activation, read, spec.read_eps)
  refs["code"][...] = code.astype(dtype)
  plgpu.commit_smem()
  scores, output = products(
    [(refs["code"], transposed(u["value"]))],
    [(refs["code"], saved["value"])],
  )
  refs["scores"][...] = (scores * between(refs, "value")).astype(dtype)
  plgpu.commit_smem()
  (found,) = products([(refs["scores"], written["value"])])
  output = from_start(refs, "value", output.shape[1]) * output - found
  refs["output"][...] = output.astype(dtype)
  return carry


def forward(
  operands: dict[str, jax.Array], spec: reference.Spec
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: Arrays by tile. `query` is `[tiles, batch, heads, tile, width]`.
      These are of both passes: `written` `[tiles, batch, heads, 2 * tile,
      width]`, `u` `[..., 2 * tile, slots]` and `saved` `[..., 2 * slots,
      width]`. `gates` is float32 `[tiles, batch, heads, len(GATES) * tile]`.
    spec: Options that define the memory.

  Returns:
    `output`, with the shape and dtype of `query`.
  """
  query = operands["query"]
  heads, tile = query.shape[2:4]
  dtype = query.dtype
  slots = operands["u"].shape[-1]
  return tile_kernel.run(
    lambda refs, scalars, carry: _body(refs, scalars, carry, spec),
    "trellis_reads",
    operands,
    {"output": jax.ShapeDtypeStruct(query.shape, dtype)},
    heads=heads,
    local={
      "scores": jax.ShapeDtypeStruct((full_tiles.TOKENS,) * 2, dtype),
      "code": jax.ShapeDtypeStruct((tile, slots), dtype),
    },
    in_place={"output": "query"},
  )
