"""Key-Value Means by TPU kernels: a kernel runs the tiles of the XLA form.

`tile` runs a tile forward. Before it, plain JAX adds the tokens to the window.
The gradient is that of the XLA form, with the assignments that the kernel made.
"""

import functools

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, derivative, dispatch
from memcomp_kernels.key_value_means import (
  reference,
  rows,
  tile,
  xla_chunked,
)
from memcomp_kernels.key_value_means.pallas_tpu import tile as tile_lib
from memcomp_kernels.pallas_tpu import LANES, launch


def unsupported(call: dispatch.Call) -> str | None:
  """Returns why the kernels cannot run a call, or None if they can."""
  if reason := launch.unavailable():
    return reason
  state, inputs, spec = call[:3]
  if spec.chunk_size % LANES:
    return f"chunk_size={spec.chunk_size} is not a multiple of {LANES}"
  if reason := contract.wrong_dtypes(inputs, "bfloat16", "float32"):
    return reason
  batch, time, heads, dim = inputs.query.shape
  most = call.max_position
  if most is not None and call.segment_ids is not None:
    # Rows may run in pieces; see `xla_chunked`.
    most, time = most + time, max(time, xla_chunked.PIECE)
  stages = xla_chunked.stages(
    spec,
    capacity=state.keys.shape[2],
    max_position=most,
    time=time,
    num_tiles=-(-time // spec.chunk_size) + 1,
  )
  state = jax.eval_shape(
    functools.partial(xla_chunked.first_rows, rows=stages[-1].rows), state
  )
  query = jax.ShapeDtypeStruct(
    (batch, heads, spec.chunk_size, dim), inputs.query.dtype
  )
  given = jax.eval_shape(_operands, state, state, query)
  return tile_lib.too_large(given, spec)


def _run(
  state: reference.State,
  inputs: reference.Inputs,
  present: jax.Array,
  spec: reference.Spec,
  capacity: int,
) -> tuple[reference.State, jax.Array]:
  """Does what `key_value_means.tile.run` does, by the kernel."""
  return _forward(state, inputs, present, spec, capacity)[0]


def _forward(state, inputs, present, spec, capacity):
  state, inputs = derivative.only_first((state, inputs))
  index = state.position // spec.chunk_size
  moves = tile.moves(state, present, spec)
  count = jnp.where(moves, tile.room(state, spec, capacity), 0)
  first, place = state.position == spec.window, index % spec.window_chunks
  counts = jnp.stack([state.length, count, moves, first, index, place], axis=1)
  size = state.keys.shape[2]
  new = tile.enter_window(state, inputs, present, spec)
  given = _operands(state, new, inputs.query)
  found = tile_lib.run(given, counts.astype(jnp.int32), spec)
  where = rows.Route(found["row"][:, :, 0], found["appended"][:, :, 0] > 0)
  new = new._replace(
    keys=found["new_keys"][:, :, :size],
    values=found["new_values"][:, :, :size],
    radii=found["new_radii"][:, :, 0, :size],
    length=state.length + count,
  )
  return (new, found["output"]), (state, inputs, present, where)


def _operands(state, new, query):
  """Returns the kernel's operands by name; their rows are padded to lanes.

  `state` is the state before a tile, and `new` holds the window after it.
  """
  padding = -state.keys.shape[2] % LANES

  def padded(x):
    return jnp.pad(x, [(0, 0), (0, 0), (0, padding), (0, 0)])

  return {
    "keys": padded(state.keys),
    "values": padded(state.values),
    "radii": jnp.swapaxes(padded(state.radii[..., None]), 2, 3),
    "leaving_keys": state.window_keys,
    "leaving_values": state.window_values,
    "leaving_gates": state.window_gates[:, :, None],
    "window_keys": new.window_keys,
    "window_values": new.window_values,
    "query": query,
    "scale": state.norm_scale[:, :, None],
    "bias": state.norm_bias[:, :, None],
    "temperatures": state.temperatures[:, :, None],
  }


def _backward(spec, capacity, residuals, cotangents):
  state, inputs, present, where = residuals

  def enter(state, chunk, count, moves, spec):
    del moves  # `where` contains this information
    return rows.add_chunk(state, chunk, count, where, spec)

  def plain(state, inputs):
    return tile.run(state, inputs, present, spec, capacity, enter)

  d_state, d_inputs = jax.vjp(plain, state, inputs)[1](cotangents)
  return d_state, d_inputs, None


ENGINE = derivative.custom_vjp(_run, _forward, _backward, (3, 4))
