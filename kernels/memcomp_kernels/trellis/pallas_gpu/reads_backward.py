"""Trellis's reads on a GPU, backward: all tiles side by side, each recomputed.

The adjoints are those of `_backward_kernel.py`. Both passes end alike: what
reads (dR, or F) and what it reads for (q, or dY) give the adjoints of what was
written, of directions and of the memory, by reads alone; `writes_backward`
has the rest. Directions at the chunk's start are found again, those per token
were kept.
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
  """An array of both passes, by pass."""
  return gates.parts(refs[name], PASSES)


def _direct(refs, scalars, spec: reference.Spec) -> None:
  """Finds and commits directions of both passes, with stale gradients."""
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


def _body(refs, scalars, carry, spec: reference.Spec):
  """One tile; see `backward`."""
  refs = refs | gates.parts(refs["gates"], GATES)
  d_gates = _parts(refs, "d_gates")
  if spec.stale:
    _direct(refs, scalars, spec)
  if "continues" in scalars:  # which had other use for the place
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
  """Adjoints that a pass leaves, with `asker` what its reads are for."""
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
  operands: dict[str, jax.Array], spec: reference.Spec
) -> dict[str, jax.Array]:
  """Runs the kernel.

  Args:
    operands: as of `reads.forward`, and `d_output`. With stale gradients
      in place of `u` `target` and float32 `rates` `[tiles, batch, heads, 2 *
      tile]`, and where chunks under way are told apart `continues` `[tiles,
      batch]` and `start_memory` `[batch, heads, 2 * slots, width]`.
    spec: the memory's meaning.

  Returns:
    `d_query`; by reads alone, of both passes, `d_written` and `d_memory` (of
    the memories before each tile), as the operands, and float32 `d_u` `[...,
    2 * tile, slots]`; float32 `d_gates` `[tiles, batch, heads, 2 * tile]`,
    reads times their adjoints, summed over slots.
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
  if spec.stale:
    local["u"] = jax.ShapeDtypeStruct(of_u[3:], dtype)
  in_place = {"d_query": "query", "d_written": "written", "d_memory": "saved"}
  results = {
    name: jax.ShapeDtypeStruct(operands[of].shape, dtype)
    for name, of in in_place.items()
  }
  return tile_kernel.run(
    lambda refs, scalars, carry: _body(refs, scalars, carry, spec),
    "trellis_reads_backward",
    operands,
    results
    | {
      # A sum's first part: rates' adjoints are sums of it over slots.
      "d_u": jax.ShapeDtypeStruct(of_u, jnp.float32),
      "d_gates": jax.ShapeDtypeStruct((*shape[:3], 2 * tile), jnp.float32),
    },
    heads=shape[2],
    local=local,
    memories=["start_memory"],
    in_place=in_place,
  )
