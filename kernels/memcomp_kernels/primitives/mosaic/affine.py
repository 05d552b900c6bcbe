"""Memories whose tiles are affine, by TPU kernels: an engine of chunk forms."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract
from memcomp_kernels.primitives import affine, tile_scan, tiles
from memcomp_kernels.primitives import form as form_lib
from memcomp_kernels.primitives.mosaic import affine_kernels, modes


def _resets(layout) -> jax.Array | None:
  if layout.flags is None:
    return None
  return layout.flags.resets.T.astype(jnp.int32)


def _forward(form, layout, operands, save):
  """Of `form.Engine`."""
  inputs, _, _ = tile_scan.lay(layout, operands)
  tile = tile_scan.prepare(form, inputs)
  (memory,), (reset,) = operands.memories, operands.reset
  found = affine_kernels.forward(
    tile, memory, resets=_resets(layout), reset=reset, save=save
  )
  outputs = affine.add_read(tile, found["read"])
  outputs = outputs.astype(_output_dtype(form, operands.memories, tile))
  _, time = form_lib.sizes(operands.inputs)
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
  wide = tile.write.dtype
  d_output = tiles.lay(layout, cotangents.outputs).astype(wide)
  d_read = d_output
  if tile.log_scale is not None:
    d_read = jnp.exp(tile.log_scale)[..., None] * d_output
  (d_final,), (saved,) = cotangents.memories, saved
  found = affine_kernels.backward(
    tile, saved, d_read, d_final, resets=_resets(layout)
  )
  d_scale = None
  if tile.log_scale is not None:
    # d log mu = <mu dY, Q A> = <mu dY A^T, Q>.
    shared_by = tile.write.shape[2] // tile.query.shape[2]
    query = jnp.repeat(tile.query.astype(wide), shared_by, axis=2)
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
  return contract.wrong_dtypes(inputs, "bfloat16", "float32")
