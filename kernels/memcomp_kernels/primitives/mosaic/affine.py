"""`primitives.affine` as Pallas TPU kernels: the memory stays on chip.

All tiles of some heads go through one kernel each way, which keeps their
memories from tile to tile; what needs no memory is prepared before, by XLA, for
all tiles at once. One grid step takes several tiles of several heads, whose
products are emitted in turn: the TPU compiler keeps their order.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.primitives import affine, tile_scan, tiles
from memcomp_kernels.primitives import form as form_lib
from memcomp_kernels.primitives.mosaic import blocks, modes, vmem

HEADS, TILES = 4, 4
"""Of a grid step, at most."""


def _forward_body(refs: dict[str, Any], size: int, heads: int) -> None:
  """One grid step of the forward kernel; see `_forward`."""
  batch, step = pl.program_id(0), pl.program_id(2)
  carried, every = refs["carried"], range(heads)

  @pl.when(step == 0)
  def _():
    carried[...] = refs["memory"][0]

  for i in range(size):
    memory = [carried[h] for h in every]
    if "resets" in refs:
      resets = refs["resets"][batch, step * size + i] != 0
      memory = [
        jnp.where(resets, refs["reset"][0, h], memory[h]) for h in every
      ]
    query = _of_heads(refs["query"], i, heads)
    dtype = query[0].dtype
    low = [x.astype(dtype) for x in memory]
    if "saved" in refs:
      for h in every:
        refs["saved"][i, 0, h] = low[h]
    error = _of_heads(refs["write"], i, heads)
    if "erase" in refs:
      erase = _of_heads(refs["erase"], i, heads)
      error = [error[h] - blocks.nn(erase[h], low[h]) for h in every]
    key = _of_heads(refs["key"], i, heads)
    written = [blocks.tn(key[h], error[h].astype(dtype)) for h in every]
    for h in every:
      carried[h] = refs["total"][i, 0, h] * memory[h] + written[h]
    for h in every:
      refs["read"][i, 0, h] = blocks.nn(query[h], low[h])

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    refs["final"][0] = carried[...]


def _backward_body(refs: dict[str, Any], size: int, heads: int) -> None:
  """One grid step of the backward kernel, from the last tile on."""
  batch, step = pl.program_id(0), pl.program_id(2)
  steps = pl.num_programs(2)
  carried, every = refs["carried"], range(heads)

  @pl.when(step == 0)
  def _():
    carried[...] = refs["d_final"][0]
    if "d_reset" in refs:
      refs["d_reset"][...] = jnp.zeros_like(refs["d_reset"])

  for i in reversed(range(size)):
    d_after = [carried[h] for h in every]
    low = [refs["saved"][i, 0, h] for h in every]
    dtype = low[0].dtype
    d_low = [x.astype(dtype) for x in d_after]
    d_read = [x.astype(dtype) for x in _of_heads(refs["d_read"], i, heads)]
    key, query = (_of_heads(refs[name], i, heads) for name in ("key", "query"))
    d_error = [blocks.nn(key[h], d_low[h]) for h in every]
    error = _of_heads(refs["write"], i, heads)
    d_memory = [blocks.tn(query[h], d_read[h]) for h in every]
    if "erase" in refs:
      erase = _of_heads(refs["erase"], i, heads)
      error = [error[h] - blocks.nn(erase[h], low[h]) for h in every]
      d_errors = [d_error[h].astype(dtype) for h in every]
      for h in every:
        d_erase = -blocks.nt(d_errors[h], low[h])
        refs["d_erase"][i, 0, h] = d_erase.astype(dtype)
        d_memory[h] = d_memory[h] - blocks.tn(erase[h], d_errors[h])
    for h in every:
      refs["d_write"][i, 0, h] = d_error[h]
      d_key = blocks.nt(error[h].astype(dtype), d_low[h])
      refs["d_key"][i, 0, h] = d_key.astype(refs["d_key"].dtype)
      d_query = blocks.nt(d_read[h], low[h])
      refs["d_query"][i, 0, h] = d_query.astype(refs["d_query"].dtype)
      d_total = low[h].astype(jnp.float32) * d_after[h]
      refs["d_total"][i, 0, h] = jnp.sum(d_total, axis=0, keepdims=True)
      d_memory[h] = d_memory[h] + refs["total"][i, 0, h] * d_after[h]
    if "resets" in refs:
      place = (steps - 1 - step) * size + i
      resets = refs["resets"][batch, place] != 0
      for h in every:
        started = jnp.where(resets, d_memory[h], 0.0)
        refs["d_reset"][0, h] = refs["d_reset"][0, h] + started
        d_memory[h] = d_memory[h] - started
    for h in every:
      carried[h] = d_memory[h]

  @pl.when(step == steps - 1)
  def _():
    refs["d_memory"][0] = carried[...]


def _of_heads(ref: jax.Ref, tile: int, heads: int) -> list[jax.Array]:
  """A tile's arrays, one a head: those of a group are of all its heads."""
  shared = ref.shape[2] == 1
  arrays = [ref[tile, 0, h] for h in range(ref.shape[2])]
  return arrays * heads if shared else arrays


def _call(
  body: Callable[..., None],
  name: str,
  operands: dict[str, jax.Array],
  results: dict[str, jax.ShapeDtypeStruct],
  *,
  resets: jax.Array | None,
  reverse: bool,
) -> dict[str, jax.Array]:
  """Runs a body over the grid (batch, heads, tiles).

  Args:
    body: of references by name, and tiles and heads of a grid step.
    name: of the kernel.
    operands: `[tiles, batch, heads or groups, ...]` by tile, or memories
      `[batch, heads, key, value]`.
    results: likewise.
    resets: int32 `[batch, tiles]`, or None.
    reverse: whether tiles are taken from the last one on.
  """
  num_tiles, batch, num_heads = operands["write"].shape[:3]
  groups = operands["key"].shape[2]
  # All heads of a step share a group, or each has its own.
  per_step = num_heads if groups == num_heads else num_heads // groups
  heads = max(n for n in range(1, HEADS + 1) if per_step % n == 0)
  size = math.gcd(num_tiles, TILES)
  steps = num_tiles // size

  def at(i):
    return steps - 1 - i if reverse else i

  def spec(x):
    if x.ndim == 4:
      return pl.BlockSpec(
        (1, heads, *x.shape[2:]), lambda b, h, i, *_: (b, h, 0, 0)
      )
    own = x.shape[2] == num_heads
    # Not `//`, whose rounding towards minus infinity asks for the TPU's kind.
    group = (lambda h: h) if own else (lambda h: lax.div(h, per_step // heads))
    block = size, 1, heads if own else 1, *x.shape[3:]
    return pl.BlockSpec(block, lambda b, h, i, *_: (at(i), b, group(h), 0, 0))

  in_specs = {name: spec(x) for name, x in operands.items()}
  out_specs = {name: spec(x) for name, x in results.items()}
  key_dim, value_dim = operands["key"].shape[-1], operands["write"].shape[-1]
  carried = pltpu.VMEM((heads, key_dim, value_dim), jnp.float32)
  arrays = [*operands.values(), *results.values()]
  specs = [*in_specs.values(), *out_specs.values()]
  vmem.check(
    vmem.num_bytes(list(zip(arrays, specs, strict=True)), [carried]),
    name,
    "take a shorter tile (Tiling.tile_time)",
  )

  def kernel(*refs):
    names = [*operands, *results, "carried"]
    if resets is not None:
      names = ["resets", *names]
    body(dict(zip(names, refs, strict=True)), size, heads)

  outputs = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=0 if resets is None else 1,
      grid=(batch, num_heads // heads, steps),
      in_specs=list(in_specs.values()),
      out_specs=list(out_specs.values()),
      scratch_shapes=[carried],
    ),
    out_shape=list(results.values()),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=vmem.LIMIT,
    ),
    name=name,
    interpret=modes.interpret(),
  )(*(() if resets is None else (resets,)), *operands.values())
  return dict(zip(results, outputs, strict=True))


def _operands(tile: affine.Tile) -> dict[str, jax.Array]:
  """What both kernels read of tiles `[tiles, batch, heads, ...]`."""
  width = tile.write.shape[-1]
  total = jnp.broadcast_to(
    tile.total[..., None, None], (*tile.total.shape, 1, width)
  )
  operands = {
    "write": tile.write,
    "erase": tile.erase,
    "key": tile.key,
    "query": tile.query,
    "total": total,
  }
  return {name: x for name, x in operands.items() if x is not None}


def _struct(x: jax.Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def _resets(layout) -> jax.Array | None:
  return None if layout.flags is None else layout.flags.resets.T.astype(int)


def _forward(form, layout, operands, save):
  """Of `form.Engine`."""
  inputs, _, _ = tile_scan.lay(layout, operands)
  tile = tile_scan.prepare(form, inputs)
  (memory,), (reset,) = operands.memories, operands.reset
  given = _operands(tile) | {"memory": memory}
  results = {"read": _struct(tile.write), "final": _struct(memory)}
  if save:
    shape = tile.write.shape[0], *memory.shape
    results["saved"] = jax.ShapeDtypeStruct(shape, tile.query.dtype)
  resets = _resets(layout)
  if resets is not None:
    given["reset"] = reset
  found = _call(
    _forward_body,
    "affine_forward",
    given,
    results,
    resets=resets,
    reverse=False,
  )
  outputs = affine.add_read(tile, found["read"])
  _, time = form_lib.sizes(operands.inputs)
  outputs = outputs.astype(_output_dtype(form, operands.memories, tile))
  outputs = tiles.unlay(layout, outputs, time)
  final = (found["final"],)
  result = form_lib.Result(final, operands.chunk_start, outputs, None)
  return result, (found["saved"],) if save else None


def _output_dtype(form, memories, tile) -> Any:
  """As the form's own tile has it."""

  def one(memories, tile):
    tile = jax.tree.map(lambda x: x[0], tile)
    return form.run_tile(memories, None, tile, None, form.spec, form.tiling)[1]

  return jax.eval_shape(one, memories, tile).dtype


def _backward(form, layout, operands, saved, cotangents):
  """Of `form.Engine`."""
  inputs, _, _ = tile_scan.lay(layout, operands)
  tile, unprepare = jax.vjp(functools.partial(tile_scan.prepare, form), inputs)
  d_output = tiles.lay(layout, cotangents.outputs)
  d_output = d_output.astype(tile.write.dtype)
  d_read = d_output
  if tile.log_scale is not None:
    d_read = jnp.exp(tile.log_scale)[..., None] * d_output
  (d_final,), (saved,) = cotangents.memories, saved
  given = _operands(tile) | {
    "saved": saved,
    "d_read": d_read,
    "d_final": d_final,
  }
  shared = tile.key.shape[2] != tile.write.shape[2]
  heads = tile.write.shape[2]

  def of_heads(x, dtype):  # [tiles, batch, groups, ...]
    return jax.ShapeDtypeStruct((*x.shape[:2], heads, *x.shape[3:]), dtype)

  wide, dtype = tile.write.dtype, tile.query.dtype
  results = {
    "d_write": _struct(tile.write),
    "d_key": of_heads(tile.key, wide if shared else dtype),
    # Read again below, for the adjoint of the scale.
    "d_query": of_heads(tile.query, wide),
    "d_total": _struct(given["total"]),
    "d_memory": _struct(d_final),
  }
  if tile.erase is not None:
    results["d_erase"] = _struct(tile.erase)
  resets = _resets(layout)
  if resets is not None:
    results["d_reset"] = _struct(d_final)
  found = _call(
    _backward_body,
    "affine_backward",
    given,
    results,
    resets=resets,
    reverse=True,
  )
  d_scale = None
  if tile.log_scale is not None:
    # d log mu = <mu dY, Q A> = <mu dY A^T, Q>.
    per = heads // tile.query.shape[2]
    query = jnp.repeat(tile.query.astype(wide), per, axis=2)
    d_scale = jnp.sum(found["d_query"] * query, axis=-1)

  def to_groups(x, like):
    x = x.reshape(*x.shape[:2], like.shape[2], -1, *x.shape[3:])
    return jnp.sum(x.astype(wide), axis=3).astype(like.dtype)

  d_tile = affine.Tile(
    write=found["d_write"],
    erase=found.get("d_erase"),
    key=to_groups(found["d_key"], tile.key),
    query=to_groups(found["d_query"], tile.query),
    log_scale=d_scale,
    output=d_output,
    total=jnp.sum(found["d_total"], axis=(-1, -2)),
  )
  (d_inputs,) = unprepare(d_tile)
  _, time = form_lib.sizes(operands.inputs)
  d_inputs = jax.tree.map(lambda x: tiles.unlay(layout, x, time), d_inputs)
  d_reset = found.get("d_reset", jnp.zeros_like(d_final))
  return form_lib.Operands(
    (found["d_memory"],), cotangents.chunk_start, (d_reset,), d_inputs
  )


def _as_saved(form, operands):
  """Of `form.Engine`."""
  (memory,) = operands.memories
  return (memory.astype(operands.inputs.query.dtype),)


ENGINE = form_lib.Engine(_forward, _backward, _as_saved)


def implementation(
  memory: str, chunk: Callable[..., Any]
) -> Callable[..., tuple[Any, jax.Array]]:
  """Returns the `chunk` of a memory by these kernels.

  Args:
    memory: its name.
    chunk: its XLA form, whose tiles are affine; takes an `engine`.
  """

  @functools.wraps(chunk)
  def by_kernels(state, inputs, *, spec, **rest):
    if reason := unsupported(inputs, spec):
      raise NotImplementedError(f"{memory} mosaic_tpu: {reason}")
    return chunk(state, inputs, spec=spec, engine=ENGINE, **rest)

  return by_kernels


def unsupported(inputs: Any, spec: Any) -> str | None:
  """Why the kernels cannot do a call here, or None."""
  del spec
  if reason := modes.unavailable():
    return reason
  dtypes = {x.dtype for x in (inputs.query, inputs.key, inputs.value)}
  wanted = jnp.dtype("bfloat16"), jnp.dtype("float32")
  if len(dtypes) > 1 or not dtypes <= set(wanted):
    return "query, key and value must all be bfloat16 or all float32"
  return None
