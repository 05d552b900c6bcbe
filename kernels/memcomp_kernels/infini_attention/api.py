"""Infini-attention: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.infini_attention import reference as _reference
from memcomp_kernels.infini_attention import types, xla_chunked
from memcomp_kernels.softmax_attention import api as attention

Association, Inputs = types.Association, types.Inputs
Spec, State = types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "infini_attention",
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
  """Returns the state before the first token: nothing seen, nothing written.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of a key.
    value_dim: width of a value.
    dtype: of all floats, float32 or float64.

  Raises:
    ValueError: `dtype` is narrower than float32.
  """
  contract.check_state_dtype(dtype)
  sizes = {"batch": batch, "heads": heads, "key_dim": key_dim}
  window = attention.init_state(
    spec.local(), **sizes, value_dim=value_dim, dtype=dtype
  )
  association = types.Association(
    memory=jnp.zeros((batch, heads, key_dim, value_dim), dtype),
    normalizer=jnp.zeros((batch, heads, key_dim), dtype),
  )
  return types.State(
    keys=window.keys,
    values=window.values,
    association=association,
    start=association if spec.stale else None,
    position=window.position,
    segment_id=window.segment_id,
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
  """Runs memory and attention over many tokens; differentiable in both.

  Args:
    state: the state before the first token.
    inputs: `[batch, time, heads, dim]` arrays, see `types.Inputs`.
    spec: the memory's meaning.
    segment_ids: int32 `[batch, time]` for packed rows, 0 is padding.
    reset_state: what a new sequence starts from, before its first token;
      default `state`.
    implementation: "reference" or "xla_chunked"; default the fastest that runs
      on the platform.
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
  function = IMPLEMENTATIONS.select(implementation)
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
  batch, heads, key_dim, value_dim = state.association.memory.shape
  size = spec.local().window_size
  if state.keys.shape[2] != size or (state.start is not None) != spec.stale:
    raise ValueError(
      f"the state was made for a window of {state.keys.shape[2]} tokens and"
      f" {'segments' if state.start is not None else 'single tokens'}; make it"
      f" with the same spec: segment_size={spec.segment_size},"
      f" window_size={spec.window_size}"
    )
  widths = {"query": key_dim, "key": key_dim, "value": value_dim}
  widths |= {
    name: key_dim
    for name in ("memory_query", "memory_key")
    if getattr(inputs, name) is not None
  }
  contract.check_inputs(inputs, batch, heads, widths | {"read_gate": 1})
