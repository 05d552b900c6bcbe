"""State passing for softmax attention: each shard receives its window."""

from typing import Any

import jax

from memcomp_kernels.parallel import state_passing
from memcomp_kernels.softmax_attention import reference


def strategy(spec: reference.Spec) -> state_passing.Strategy:
  """Returns the state passing strategy for keys and values.

  See `state_passing.window_before`. A message has the size of a window, or of
  all keys and values if nothing bounds the window.
  """

  def pass_state(
    chunk: state_passing.Chunk,
    axis: str,
    state: reference.State,
    inputs: reference.Inputs,
    segment_ids: jax.Array | None,
    reset_state: reference.State,
  ) -> tuple[Any, ...]:
    before = state_passing.ids_before(axis, state.segment_id, segment_ids)
    (keys, values), position = state_passing.window_before(
      axis,
      ((state.keys, state.values), state.position),
      (inputs.key, inputs.value),
      segment_ids,
      before,
      ((reset_state.keys, reset_state.values), reset_state.position),
      sink_tokens=spec.sink_tokens,
    )
    after, outputs, *stats = chunk(
      reference.State(keys, values, position, before),
      inputs,
      segment_ids=segment_ids,
      reset_state=reset_state if segment_ids is not None else None,
    )
    return state_passing.of_last(after, axis), outputs, *stats

  return pass_state
