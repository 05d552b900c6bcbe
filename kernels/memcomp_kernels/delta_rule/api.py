"""The delta rule: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.delta_rule import reference as _reference
from memcomp_kernels.delta_rule import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "delta_rule",
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
  del spec
  contract.check_state_dtype(dtype)
  return types.State(
    memory=jnp.zeros((batch, heads, key_dim, value_dim), dtype),
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
    The state after the last token, and o `[batch, time, heads, value]` in the
    query's dtype.

  Raises:
    NotImplementedError: the named implementation cannot run here.
    ValueError: shapes do not fit the state or each other.
  """
  check_inputs(state, inputs)
  function = IMPLEMENTATIONS.select(implementation)
  return function(
    state,
    inputs,
    spec=spec,
    segment_ids=segment_ids,
    reset_state=reset_state,
  )


def check_inputs(state: types.State, inputs: types.Inputs) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, key_dim, value_dim = state.memory.shape
  widths = {
    "query": key_dim,
    "key": key_dim,
    "value": value_dim,
    "log_decay": 1,
    "write_rate": 1,
  }
  contract.check_inputs(inputs, batch, heads, widths)
