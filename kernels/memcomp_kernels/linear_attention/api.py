"""Linear attention: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.linear_attention import mosaic_tpu, types, xla_chunked
from memcomp_kernels.linear_attention import reference as _reference

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "linear_attention",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=mosaic_tpu.chunk,
  limits={"mosaic_tpu": mosaic_tpu.unsupported},
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


chunk = IMPLEMENTATIONS.chunk(check_inputs)
