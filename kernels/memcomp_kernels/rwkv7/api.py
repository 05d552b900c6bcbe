"""RWKV-7's memory: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.rwkv7 import reference as _reference
from memcomp_kernels.rwkv7 import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "rwkv7",
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
  memory: jax.Array | None = None,
) -> types.State:
  """Returns the state before the first token.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys.
    value_dim: width of values.
    dtype: of the memory, float32 or float64.
    memory: `[heads, key, value]`; default zeros.

  Raises:
    ValueError: `dtype` is narrower than float32.
  """
  del spec
  contract.check_state_dtype(dtype)
  shape = batch, heads, key_dim, value_dim
  if memory is None:
    filled = jnp.zeros(shape, dtype)
  else:
    filled = jnp.broadcast_to(memory.astype(dtype), shape)
  return types.State(filled, jnp.zeros(batch, jnp.int32))


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  del spec
  batch, heads, key_dim, value_dim = state.memory.shape
  widths = dict.fromkeys(types.Inputs._fields, key_dim) | {"value": value_dim}
  contract.check_inputs(inputs, batch, heads, widths)


chunk = IMPLEMENTATIONS.chunk(check_inputs)
