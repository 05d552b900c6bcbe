"""State space duality: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.state_space_duality import (
  mosaic_gpu,
  mosaic_tpu,
  types,
  xla_chunked,
)
from memcomp_kernels.state_space_duality import reference as _reference

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "state_space_duality",
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


chunk = IMPLEMENTATIONS.chunk(check_inputs)
