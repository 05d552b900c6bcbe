"""Linear attention: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.linear_attention import reference as _reference
from memcomp_kernels.linear_attention import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "linear_attention",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
)


def init_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  dtype: Any = jnp.float32,
) -> types.State:
  """Returns the state before the first token: a memory of zeros.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of a key.
    value_dim: width of a value.
    dtype: of the memory, float32 or float64.

  Raises:
    ValueError: `dtype` is narrower than float32.
  """
  contract.check_state_dtype(dtype)
  normalizer = None
  if spec.normalize:
    normalizer = jnp.zeros((batch, heads, key_dim), dtype)
  return types.State(
    memory=jnp.zeros((batch, heads, key_dim, value_dim), dtype),
    normalizer=normalizer,
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
) -> tuple[types.State, jax.Array]:
  """Runs the memory over many tokens; differentiable in state and inputs.

  Args:
    state: the state before the first token.
    inputs: `[batch, time, heads, dim]` arrays, see `types.Inputs`.
    spec: the memory's meaning.
    segment_ids: int32 `[batch, time]` for packed rows, 0 is padding.
    reset_state: what a new segment starts from; default `state`.
    implementation: "reference" or "xla_chunked"; default the fastest that runs
      on the platform.

  Returns:
    The state after the last token, and y `[batch, time, heads, value]` in the
    query's dtype.

  Raises:
    NotImplementedError: the named implementation cannot run here.
    ValueError: shapes do not fit the state or each other.
  """
  check_inputs(state, inputs, spec)
  function = IMPLEMENTATIONS.select(implementation)
  return function(
    state,
    inputs,
    spec=spec,
    segment_ids=segment_ids,
    reset_state=reset_state,
  )


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  if (state.normalizer is not None) != spec.normalize:
    raise ValueError(
      f"the state was made with normalize={not spec.normalize}; make it with"
      f" the same spec: normalize={spec.normalize}"
    )
  batch, heads, key_dim, value_dim = state.memory.shape
  widths = {
    "query": key_dim,
    "key": key_dim,
    "value": value_dim,
    "log_decay": 1 if spec.forget_gate else None,
  }
  contract.check_inputs(inputs, batch, heads, widths)
