"""Trellis's reads on a GPU, backward: the kernel recomputes each tile.

All tiles run in parallel. The adjoints are those of
`trellis.pallas_tpu.backward`. Both passes end in the same way. A pass has its
reader (dR, or F) and the array that it reads for (q, or dY). From these follow
the adjoints of written tokens, directions and memory, as far as they come from
reads. `writes_backward` computes the rest. The kernel recomputes directions at
the chunk's start; the forward pass saved those per token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from memcomp_kernels.pallas_gpu import full_tiles, gates, rows, tile_kernel
from memcomp_kernels.pallas_gpu.products import products, transposed
from memcomp_kernels.trellis import reference
from memcomp_kernels.trellis.pallas_gpu import writes
from memcomp_kernels.trellis.pallas_gpu.reads import (
  GATES,
  PASSES,
  between,
  from_start,
)


def _parts(refs: dict[str, Any], name: str) -> dict[str, Any]:
  """Returns the references of an array of both passes, by pass."""
  return gates.parts(refs[name], PASSES)


def _direct(refs, scalars, spec: reference.Spec) -> None:
  """Computes and commits both passes' directions at the chunk's start."""
  rates, u, at = (_parts(refs, name) for name in ("rates", "u", "saved"))
  written = _parts(refs, "written")
  if "continues" in scalars:
    given, saved = _parts(refs, "start_memory"), at
    at = {name: refs[f"at_{name}"] for name in PASSES}
    for name in PASSES:
      start = lax.cond(
        scalars["continues"] != 0,
        lambda name=name: tile_kernel.load(given[name]),
        lambda name=name: tile_kernel.wide(saved[name]),
      )
      at[name][...] = start.astype(at[name].dtype)
    plgpu.commit_smem()
  z = products(*([(written[x], transposed(at[x]))] for x in PASSES))
  for name, found in zip(PASSES, z, strict=True):
    found = writes.direct(refs, spec, found, rates[name])
    u[name][...] = found.astype(u[name].dtype)
  plgpu.commit_smem()


def _body(refs, scalars, carry, spec: reference.Spec, block: int | None):
  """Computes one tile; see `backward`."""
  refs = refs | gates.parts(refs["gates"], GATES)
  d_gates = _parts(refs, "d_gates")
  if block is None:
    _direct(refs, scalars, spec)
  if "continues" in scalars:  # `_direct` no longer needs these arrays
    own = (pl.ds(0, full_tiles.TOKENS),) * 2
    refs |= {f"scores_{name}": refs[f"at_{name}"].at[own] for name in PASSES}
  saved, u, written = (_parts(refs, x) for x in ("saved", "u", "written"))

  def store(name, x):
    refs[name][...] = x.astype(refs[name].dtype)

  read, scores = products(
    [(refs["query"], transposed(saved["key"]))],
    [(refs["query"], transposed(written["key"]))],
  )
  store("scores_key", scores * between(refs, "key"))
  plgpu.commit_smem()
  found, scores, d_code = products(
    [(refs["scores_key"], u["key"])],
    [(refs["d_output"], transposed(written["value"]))],
    [(refs["d_output"], transposed(saved["value"]))],
  )
  read = from_start(refs, "key", read.shape[1]) * read - found
  activation = spec.read_activation, read, spec.read_eps
  code = rows.activate(*activation)
  store("reader_value", code)
  store("scores_value", scores * between(refs, "value"))
  plgpu.commit_smem()
  (found,) = products([(refs["scores_value"], u["value"])])
  d_code = from_start(refs, "value", d_code.shape[1]) * d_code - found
  d_read = rows.activate_adjoint(*activation, d_code)
  store("reader_key", d_read)
  d_gates["value"][...] = jnp.sum(d_code * code, axis=1)
  d_gates["key"][...] = jnp.sum(d_read * read, axis=1)
  plgpu.commit_smem()
  _finish(refs, "value", refs["d_output"])
  _finish(refs, "key", refs["query"])
  return carry


def _finish(refs, name: str, asker: Any) -> None:
  """Computes a pass's adjoints; `asker` is the array that it reads for."""
  reader, scores = refs[f"reader_{name}"], refs[f"scores_{name}"]
  u = _parts(refs, "u")[name]
  dtype = reader.dtype
  d_u, d_scores = products(
    [(transposed(scores), reader)], [(reader, transposed(u))]
  )
  _parts(refs, "d_u")[name][...] = -d_u
  scores[...] = (-(d_scores * between(refs, name))).astype(dtype)
  read = tile_kernel.wide(reader)
  reader[...] = (read * from_start(refs, name, read.shape[1])).astype(dtype)
  plgpu.commit_smem()
  into_query = [
    (reader, _parts(refs, "saved")[name]),
    (scores, _parts(refs, "written")[name]),
  ]
  d_written, d_memory, *d_query = products(
    [(transposed(scores), asker)],
    [(transposed(reader), asker)],
    *([into_query] if name == "key" else []),
  )
  _parts(refs, "d_written")[name][...] = d_written.astype(dtype)
  _parts(refs, "d_memory")[name][...] = d_memory.astype(dtype)
  if d_query:
    refs["d_query"][...] = d_query[0].astype(dtype)


def backward(
  operands: dict[str, jax.Array], spec: reference.Spec, block: int | None
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: The operands of `reads.forward`, and `d_output`. With gradients at
      the chunk's start, `target` and float32 `rates` `[tiles, batch, heads, 2 *
      tile]` replace `u`. If chunks may have begun before the call, there are
      also `continues` `[tiles, batch]` and `start_memory` `[batch, heads, 2 *
      slots, width]`.
    spec: Options that define the memory.
    block: Result of `tiles.block_of`.

  Returns:
    `d_query`, and the adjoints through reads alone, of both passes. `d_written`
    and `d_memory` (of the memories before each tile) have the operands' shapes.
    `d_u` is float32 `[..., 2 * tile, slots]`. `d_gates` is float32 `[tiles,
    batch, heads, 2 * tile]`: reads times their adjoints, summed over slots.
  """
  saved = operands["saved"]
  shape, dtype = saved.shape, saved.dtype
  slots = shape[3] // len(PASSES)
  tile = operands["query"].shape[3]
  of_u = (*shape[:3], len(PASSES) * tile, slots)
  part = jax.ShapeDtypeStruct((tile, slots), dtype)
  square = jax.ShapeDtypeStruct((full_tiles.TOKENS,) * 2, dtype)
  at = jax.ShapeDtypeStruct((slots, shape[4]), dtype)
  kinds = {"reader": part}
  kinds |= {"at": at} if "continues" in operands else {"scores": square}
  local = {f"{kind}_{x}": kinds[kind] for kind in kinds for x in PASSES}
  if block is None:
    local["u"] = jax.ShapeDtypeStruct(of_u[3:], dtype)
  in_place = {"d_query": "query", "d_written": "written", "d_memory": "saved"}
  results = {
    name: jax.ShapeDtypeStruct(operands[of].shape, dtype)
    for name, of in in_place.items()
  }
  return tile_kernel.run(
    lambda refs, scalars, carry: _body(refs, scalars, carry, spec, block),
    "trellis_reads_backward",
    operands,
    results
    | {
      # float32, because the rates' adjoints are sums over slots, and this is
      # their first term.
      "d_u": jax.ShapeDtypeStruct(of_u, jnp.float32),
      "d_gates": jax.ShapeDtypeStruct((*shape[:3], 2 * tile), jnp.float32),
    },
    heads=shape[2],
    local=local,
    memories=["start_memory"],
    in_place=in_place,
  )
