"""Attention of a call from a fresh state, by a kernel of a library.

In such a call the line of `window` has only the call's own tokens. What a token
sees is then a fixed mask over places; in packed rows runs must match as well.
The new state is computed as in `xla_chunked`.
"""

from collections.abc import Callable

import jax

from memcomp_kernels import window
from memcomp_kernels.softmax_attention import reference

Attend = Callable[..., jax.Array]
"""(query, key, value, run, *, spec, size) -> outputs.

These are `[batch, time, heads, dim]` arrays, and run is int32 `[batch, time]`,
or None for one run. Besides runs, a place's index, `spec` and the state's
`size` determine what it sees.
"""


def implementation(
  name: str, attend: Attend, unsupported: Callable[..., str | None]
) -> Callable[..., tuple[reference.State, jax.Array]]:
  """Returns the `chunk` of a library's kernel; see `Op.chunk`.

  Args:
    name: name of the implementation.
    attend: the kernel.
    unsupported: (state, inputs, spec, segment_ids, reset_state, max_position)
      -> why the kernel cannot run a call, or None.
  """

  def chunk(
    state,
    inputs,
    *,
    spec,
    segment_ids=None,
    reset_state=None,
    max_position=None,
  ):
    call = state, inputs, spec, segment_ids, reset_state, max_position
    if reason := unsupported(*call):
      raise NotImplementedError(f"softmax_attention {name}: {reason}")
    return _chunk(attend, state, inputs, spec, segment_ids)

  return chunk


def _chunk(attend, state, inputs, spec, segment_ids):
  size = state.keys.shape[2]
  plan = window.plan(
    segment_ids,
    state.segment_id,
    state.position,
    state.position,
    time=inputs.query.shape[1],
    size=size,
    sink_tokens=spec.sink_tokens,
    max_position=0,
  )
  rows = state.keys, state.values
  joined = window.join(plan, rows, (inputs.key, inputs.value))
  run = None if segment_ids is None else plan.run
  query = window.compact(plan, inputs.query)
  outputs = attend(query, *joined, run, spec=spec, size=size)
  keys, values = window.advance(plan, rows, rows, joined)
  state = reference.State(keys, values, plan.next_position, plan.segment_id)
  return state, window.restore(plan, outputs)


def unsupported(
  state: reference.State,
  inputs: reference.Inputs,
  spec: reference.Spec,
  segment_ids: jax.Array | None,
  reset_state: reference.State | None,
  max_position: int | None,
) -> str | None:
  """Says why a call is not from fresh states with a mask over places, or None.

  Arguments are those of `Op.chunk`.
  """
  if max_position != 0:
    return "the state may hold tokens: give max_position=0 where it is fresh"
  if inputs.sink_query is not None:
    return "sinks meet a query of their own, sink_query"
  if segment_ids is None:
    return None
  if reset_state is not None:
    return "reset_state may hold tokens: leave it out where state is fresh"
  if sees_all(spec, inputs.query.shape[1], state.keys.shape[2]):
    return None
  for name in ("sink_tokens", "chunk_size"):
    if getattr(spec, name):
      return f"{name} in packed rows goes by positions in segments"
  return None


def sees_all(spec: reference.Spec, time: int, size: int) -> bool:
  """Whether every token sees all tokens before it, in its run."""
  return spec.chunk_size is None and time <= size
