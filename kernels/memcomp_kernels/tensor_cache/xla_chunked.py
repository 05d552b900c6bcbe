"""Tensor Cache as matrix products, in plain JAX.

Local attention and memory are independent. Local attention is banded attention
over the window's tokens and the call's tokens (`softmax_attention`). The memory
is a scan over tiles (`tile.py` has their algebra). `window` first removes
padding, so a tile holds tokens of any segments, in any phase of their chunks.
The gradient stores the memories at tile starts and recomputes the rest.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, dispatch, window
from memcomp_kernels.softmax_attention import reference as attention
from memcomp_kernels.softmax_attention import tile as attention_tile
from memcomp_kernels.tensor_cache import reference, tile


class Kernels(NamedTuple):
  """The functions that run the two parts of a call.

  Attributes:
    attend: a function like `chunk` of `softmax_attention.tile`.
    memory: a function like `memory` of this module.
  """

  attend: Callable[..., tuple[attention.State, jax.Array]]
  memory: Callable[..., tuple[tile.Carry, jax.Array]]


def chunk(
  call: dispatch.Call, kernels: Kernels | None = None
) -> tuple[reference.State, jax.Array]:
  """Computes what `reference` does, in chunk form; see `Op.chunk`.

  Args:
    call: the call.
    kernels: what runs local attention and memory; None for plain JAX.
  """
  kernels = kernels or Kernels(attention_tile.chunk, memory)
  state, inputs, spec = call[:3]
  reset_state = call.reset
  local, new = _local_attention(kernels.attend, call)
  where = window.placement_of(call, spec.window_size)
  written, writes, routes = _writes(where, state, reset_state, inputs, spec)
  inputs = window.compact(where, inputs)
  carry, reads = kernels.memory(
    where, state, reset_state, _tokens(spec, inputs, written), writes, spec
  )
  state = reference.State(
    window=reference.Window(new.keys, new.values, routes),
    memories=carry.memories,
    starts=carry.starts,
    sums=carry.sums,
    position=where.next_position,
    segment_id=where.segment_id,
  )
  reads = window.restore(where, reads)
  return state, jnp.concatenate([local, reads], axis=-1)


def _local_attention(attend, call):
  """Returns the outputs of local attention, and its new state."""
  inputs, spec = call.inputs, call.spec

  def own(state):
    return attention.State(
      state.window.key, state.window.value, state.position, state.segment_id
    )

  new, outputs = attend(
    call._replace(
      state=own(call.state),
      inputs=attention.Inputs(inputs.query, inputs.key, inputs.value),
      spec=attention.Spec(
        window_size=spec.window_size, sink_tokens=spec.sink_tokens
      ),
      reset_state=None if call.reset_state is None else own(call.reset_state),
    )
  )
  return outputs, new


def _writes(where, state, reset_state, inputs, spec):
  """Returns what each token writes, whether it writes, and new rows of routes.

  All are in the order of `window.compact`.
  """
  token = reference.Window(inputs.key, inputs.value, inputs.write_route)
  if spec.chunked:
    return window.compact(where, token), where.run[:, where.prior :] >= 0, None
  rows, reset_rows = state.window, reset_state.window
  if not spec.routes_evicted:
    token = token._replace(write_route=None)
  joined = window.join(where, rows, token)
  written, writes = window.evicted(where, joined, reset_rows)
  if not spec.routes_evicted:
    route = window.compact(where, inputs.write_route)
    return written._replace(write_route=route), writes, None
  routes = window.advance(
    where, rows.write_route, reset_rows.write_route, joined.write_route
  )
  return written, writes, routes


def _tokens(
  spec, inputs: reference.Inputs, written: reference.Window
) -> reference.Inputs:
  """Returns the memory's view of the tokens, `[batch, time, heads, ...]`."""
  dtype = inputs.query.dtype
  wide = contract.accumulation_dtype(inputs.query, inputs.log_decay)
  written = reference.entry(spec, written, wide)
  query = inputs.query.astype(wide)
  if spec.unit_queries:
    query = reference.unit(query)
  gates = jax.tree.map(
    lambda x: x.astype(wide),
    {
      "log_decay": inputs.log_decay,
      "write_rate": inputs.write_rate,
      "write_route": written.write_route,
      "read_route": inputs.read_route,
      "read_mix": inputs.read_mix,
    },
  )
  return reference.Inputs(
    query.astype(dtype),
    written.key.astype(dtype),
    written.value.astype(dtype),
    **gates,
  )


def memory(
  where: window.Placement,
  state: reference.State,
  reset_state: reference.State,
  tokens: reference.Inputs,
  writes: jax.Array,
  spec: reference.Spec,
) -> tuple[tile.Carry, jax.Array]:
  """Runs the memory of a call, in plain JAX.

  Args:
    where: placement of the call.
    state: the state before the call.
    reset_state: the state that a new segment starts from.
    tokens: `[batch, time, heads, ...]`, in the order of `window.compact`.
    writes: bool `[batch, time]`, whether each token writes, in the same order.
    spec: the memory's options.

  Returns:
    The memory's part of the new state, and reads `[batch, time, heads, value]`
    in the query's dtype and the order of `tokens`.
  """
  time = writes.shape[1]
  run = where.run[:, where.prior :]
  starts = None
  if where.source is not None:
    starts = (run > 0) & (jnp.diff(run, axis=1, prepend=0) > 0)
  phase = None
  if spec.chunked:
    phase = where.position[:, where.prior :] % spec.chunk_size
    phase = jnp.where(run >= 0, phase, -1)
  roles = tile.Roles(writes, starts, phase)

  size = tile.tile_time(spec, time)
  laid = jax.tree.map(
    lambda x: jnp.moveaxis(contract.cut_time(x, size), 2, 3), tokens
  )
  flags = roles._replace(
    **{
      name: contract.cut_time(x, size, -1 if name == "phase" else False)
      for name, x in roles._asdict().items()
      if x is not None
    }
  )
  reset = _carry(reset_state, spec)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def body(carry, laid):
    tokens, roles = laid
    return tile.run(carry, reset, tokens, roles, spec)

  carry, reads = lax.scan(body, _carry(state, spec), (laid, flags))
  reads = jnp.moveaxis(reads, (0, 2), (1, 3))
  reads = reads.reshape(reads.shape[0], -1, *reads.shape[3:])[:, :time]
  return _finish(where, state, carry, tokens, spec), reads


def _carry(state: reference.State, spec: reference.Spec) -> tile.Carry:
  """Returns the scan's carry, with timescales and slots as lanes."""

  def lanes(memories):
    return jax.tree.map(
      lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), memories
    )

  starts = None if state.starts is None else lanes(state.starts)
  memories = lanes(state.memories)
  if spec.chunk_mean:
    between = state.position % spec.chunk_size == 0
    memories = contract.batched_where(between, memories, starts)
    starts = None
  return tile.Carry(memories, starts, state.sums)


def _finish(where, state, carry, tokens, spec) -> tile.Carry:
  """Returns the memory's part of the new state from the last tile's carry."""

  def slots(memories):
    lanes = spec.timescales, spec.num_slots
    return jax.tree.map(
      lambda x: x.reshape(*x.shape[:2], *lanes, *x.shape[3:]), memories
    )

  memories, starts, sums = slots(carry.memories), carry.starts, carry.sums
  if not spec.chunked:
    return tile.Carry(memories, None, None)
  phase = where.next_position % spec.chunk_size
  if not spec.chunk_mean:
    starts = contract.batched_where(phase == 0, memories, slots(starts))
    return tile.Carry(memories, starts, None)
  # The unfinished chunk writes as if it ended with its last token.
  starts = memories
  last = jnp.maximum(where.tokens - 1, 0)[:, None, None, None]
  log_decay, rate = (
    jnp.take_along_axis(x, last, axis=1)[:, 0]
    for x in (tokens.log_decay, tokens.write_rate)
  )
  gates = jnp.exp(log_decay), rate, None
  memories = reference.write_chunk_mean(
    starts, sums, jnp.maximum(phase, 1), gates
  )
  memories = contract.batched_where(phase == 0, starts, memories)
  memories = contract.batched_where(where.tokens == 0, state.memories, memories)
  return tile.Carry(memories, starts, sums)
