"""The delta rule: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.delta_rule import (
  mosaic_gpu,
  mosaic_tpu,
  types,
  xla_chunked,
)
from memcomp_kernels.delta_rule import reference as _reference

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "delta_rule",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=mosaic_tpu.chunk,
  mosaic_gpu=mosaic_gpu.chunk,
  limits={
    "mosaic_tpu": mosaic_tpu.unsupported,
    "mosaic_gpu": mosaic_gpu.unsupported,
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


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  del spec
  batch, heads, key_dim, value_dim = state.memory.shape
  widths = {
    "query": key_dim,
    "key": key_dim,
    "value": value_dim,
    "log_decay": 1,
    "write_rate": 1,
  }
  contract.check_inputs(inputs, batch, heads, widths)


chunk = IMPLEMENTATIONS.chunk(check_inputs)
