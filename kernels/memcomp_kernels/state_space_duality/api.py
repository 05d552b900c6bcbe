"""State space duality: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.state_space_duality import reference as _reference
from memcomp_kernels.state_space_duality import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "state_space_duality",
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
    key_dim: width of a key, the paper's state size N.
    value_dim: width of a value, its head size P.
    dtype: of the memory, float32 or float64.

  Raises:
    ValueError: `dtype` is narrower than float32, or heads make no groups.
  """
  _groups(spec, heads)
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


def _groups(spec: types.Spec, heads: int) -> int:
  """How many queries and keys there are for `heads`."""
  if heads % spec.heads_per_group:
    raise ValueError(
      f"heads_per_group={spec.heads_per_group} must divide heads={heads}"
    )
  return heads // spec.heads_per_group


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, key_dim, value_dim = state.memory.shape
  shared = {"query": key_dim, "key": key_dim}
  contract.check_inputs(inputs, batch, _groups(spec, heads), shared)
  own = {
    "value": value_dim,
    "log_decay": 1,
    "write_rate": 1,
    "skip": 1 if spec.skip else None,
  }
  contract.check_inputs(inputs, batch, heads, own)
