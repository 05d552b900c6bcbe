"""Softmax attention: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.softmax_attention import (
  library_gpu,
  library_tpu,
  types,
  xla_chunked,
)
from memcomp_kernels.softmax_attention import over_time as _over_time
from memcomp_kernels.softmax_attention import reference as _reference

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step
over_time = _over_time.over_time

IMPLEMENTATIONS = dispatch.Implementations(
  "softmax_attention",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  library_tpu=library_tpu.chunk,
  library_gpu=library_gpu.chunk,
  limits={
    "library_tpu": library_tpu.unsupported,
    "library_gpu": library_gpu.unsupported,
  },
)


def init_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  dtype: Any = jnp.float32,
  length: int | None = None,
) -> types.State:
  """Returns the state before the first token: an empty window.

  Args:
    spec: the attention's meaning.
    batch: rows.
    heads: of keys and values; queries may have a multiple of them.
    key_dim: width of a key.
    value_dim: width of a value.
    dtype: of keys and values, float32 or float64.
    length: tokens the state must hold where `spec.window_size` is None; else
      not read. Longer segments lose their oldest tokens but the sinks.

  Raises:
    ValueError: `dtype` is narrower than float32, or `length` is missing or too
      short.
  """
  contract.check_state_dtype(dtype)
  size = spec.window_size
  if size is None:
    if length is None or length <= spec.sink_tokens:
      raise ValueError(
        f"length={length} must be the tokens that the state can hold, more than"
        f" sink_tokens={spec.sink_tokens}: window_size is None"
      )
    size = length
  shape = (batch, heads, size)
  return types.State(
    keys=jnp.zeros((*shape, key_dim), dtype),
    values=jnp.zeros((*shape, value_dim), dtype),
    position=jnp.zeros(batch, jnp.int32),
    segment_id=jnp.zeros(batch, jnp.int32),
  )


def chunk(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
  implementation: str | None = None,
  seen: int | None = None,
) -> tuple[types.State, jax.Array]:
  """Attends from many tokens; differentiable in state and inputs.

  Args:
    state: the state before the first token.
    inputs: `[batch, time, heads, dim]` arrays, of key and value `[batch, time,
      kv_heads, dim]`, see `types.Inputs`.
    spec: the attention's meaning.
    segment_ids: int32 `[batch, time]` for packed rows, 0 is padding.
    reset_state: what a new segment starts from; default `state`.
    implementation: "reference", "xla_chunked", or a kernel of a library for
      calls from a fresh state, "library_tpu" (splash attention) or
      "library_gpu" (cuDNN); default the first of the platform that can do it.
    seen: an upper bound of `state.position` where one is known (0: the state is
      fresh): it saves work, and a wrong one loses tokens.

  Returns:
    The state after the last token, and y `[batch, time, heads, value]` in the
    query's dtype.

  Raises:
    NotImplementedError: the named implementation cannot run here.
    ValueError: shapes do not fit the state or each other.
  """
  check_inputs(state, inputs, spec)
  call = state, inputs, spec, segment_ids, reset_state, seen
  function = IMPLEMENTATIONS.select(implementation, call)
  return function(
    state,
    inputs,
    spec=spec,
    segment_ids=segment_ids,
    reset_state=reset_state,
    seen=seen,
  )


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, size, key_dim = state.keys.shape
  value_dim = state.values.shape[-1]
  if spec.window_size not in (None, size):
    raise ValueError(
      f"the state holds {size} tokens, spec.window_size is {spec.window_size}"
    )
  of_queries = inputs.query.shape[2] if inputs.query.ndim > 2 else heads
  sinks = (key_dim, None) if spec.sink_tokens else None
  contract.check_inputs(
    inputs, batch, of_queries, {"query": key_dim, "sink_query": sinks}
  )
  contract.check_inputs(
    inputs, batch, heads, {"key": key_dim, "value": value_dim}
  )
  if of_queries % heads:
    raise ValueError(
      f"query has {of_queries} heads, not a multiple of the {heads} heads of"
      " keys and values"
    )
