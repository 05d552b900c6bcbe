"""Trellis's reads as a Pallas GPU kernel, all tiles side by side.

Of what `writes` leaves: the memories before each tile and the directions
of its tokens, in both of which reads are products (`tile.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.pallas_gpu import full_tiles, gates, rows, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed
from memcomp_kernels.trellis import reference

PASSES = "key", "value"
"""As arrays of both have them, one's rows behind the other's."""
GATES = "log_key", "since_key", "log_value", "since_value"
"""What `gates` of reads hold, by token: of each pass sums of log decays from
the tile's start, and a copy of them."""


def between(refs: dict[str, Any], name: str) -> jax.Array:
  """Omega of a pass."""
  return gates.between(refs[f"log_{name}"], refs[f"since_{name}"])


def from_start(refs: dict[str, Any], name: str, width: int) -> jax.Array:
  """Mu of a pass, in `width` columns."""
  return jnp.exp(gates.along(refs[f"log_{name}"], 0, width))


def _body(refs, scalars, carry, spec: reference.Spec):
  """One tile; see `forward`."""
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
    operands: by tile `query` `[tiles, batch, heads, tile, width]`; of both
      passes `written` `[tiles, batch, heads, 2 * tile, width]`, `u` `[..., 2 *
      tile, slots]` and `saved` `[..., 2 * slots, width]`; float32 `gates`
      `[tiles, batch, heads, len(GATES) * tile]`.
    spec: the memory's meaning.

  Returns:
    `output`, of `query`'s shape and dtype.
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
