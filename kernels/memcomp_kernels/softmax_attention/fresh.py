"""Attention of a call from a fresh state, by a kernel of a library.

A fresh state holds no tokens, so a token sees earlier tokens of the same call
only. Which ones depends on their indices, so the kernel gets a fixed mask. In
packed rows it also gets each token's run (`window`): tokens see their own run
only. The new state is computed as in `tile.chunk`.
"""

import functools
from collections.abc import Callable

import jax

from memcomp_kernels import dispatch, window
from memcomp_kernels.softmax_attention import reference

Attend = Callable[..., jax.Array]
"""(query, key, value, run, *, spec, size) -> outputs.

These are `[batch, time, heads, dim]` arrays, and run is int32 `[batch, time]`,
or None for one run. A token sees tokens of its own run; which ones follows from
its index, `spec` and the state's `size`.
"""


def implementation(
  attend: Attend,
) -> Callable[[dispatch.Call], tuple[reference.State, jax.Array]]:
  """Returns the `chunk` of a library's kernel, `attend`; see `Op.chunk`."""
  return functools.partial(_chunk, attend)


def _chunk(attend, call):
  state, inputs, spec, segment_ids = call[:4]
  size = state.keys.shape[2]
  where = window.placement_of(call, size)
  rows = state.keys, state.values
  joined = window.join(where, rows, (inputs.key, inputs.value))
  run = None if segment_ids is None else where.run
  query = window.compact(where, inputs.query)
  outputs = attend(query, *joined, run, spec=spec, size=size)
  keys, values = window.advance(where, rows, rows, joined)
  state = reference.State(keys, values, where.next_position, where.segment_id)
  return state, window.restore(where, outputs)


def unsupported(call: dispatch.Call) -> str | None:
  """Says why a call is not from a fresh state with a fixed mask, or None."""
  inputs, spec = call.inputs, call.spec
  if call.max_position != 0:
    return "the state may hold tokens: give max_position=0 where it is fresh"
  if inputs.sink_query is not None:
    return "sinks meet a query of their own, sink_query"
  if call.segment_ids is None:
    return None
  if call.reset_state is not None:
    return "reset_state may hold tokens: leave it out where state is fresh"
  if sees_all(spec, inputs.query.shape[1], call.state.keys.shape[2]):
    return None
  for name in ("sink_tokens", "chunk_size"):
    if getattr(spec, name):
      return f"{name} in packed rows goes by positions in segments"
  return None


def sees_all(spec: reference.Spec, time: int, size: int) -> bool:
  """Whether every token sees all tokens before it, in its run."""
  return spec.chunk_size is None and time <= size
