"""Online vector quantisation: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.ovq import reference as _reference
from memcomp_kernels.ovq import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "ovq",
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
  """Returns the state before the first token: an empty dictionary.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys.
    value_dim: width of values.
    dtype: of the dictionary, float32 or float64.

  Raises:
    ValueError: `dtype` is narrower than float32.
  """
  contract.check_state_dtype(dtype)

  def zeros(*shape):
    return jnp.zeros((batch, heads, *shape), dtype)

  return types.State(
    keys=zeros(spec.max_rows, key_dim),
    values=zeros(spec.max_rows, value_dim),
    counts=zeros(spec.max_rows),
    pending_keys=zeros(spec.chunk_size, key_dim),
    pending_values=zeros(spec.chunk_size, value_dim),
    position=jnp.zeros(batch, jnp.int32),
    segment_id=jnp.zeros(batch, jnp.int32),
  )


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, rows, key_dim = state.keys.shape
  chunk_size = state.pending_keys.shape[2]
  if (rows, chunk_size) != (spec.max_rows, spec.chunk_size):
    raise ValueError(
      f"the state has {rows} rows and chunks of {chunk_size}, the spec"
      f" max_rows={spec.max_rows} and chunk_size={spec.chunk_size}"
    )
  contract.check_inputs(
    inputs,
    batch,
    heads,
    {"query": key_dim, "key": key_dim, "value": state.values.shape[-1]},
  )


chunk = IMPLEMENTATIONS.chunk(check_inputs)
