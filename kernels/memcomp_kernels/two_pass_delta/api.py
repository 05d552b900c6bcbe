"""The two-pass delta rule: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.two_pass_delta import reference as _reference
from memcomp_kernels.two_pass_delta import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "two_pass_delta",
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
  source_dim: int | None = None,
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
) -> types.State:
  """Returns the state before the first token.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys and codes.
    value_dim: width of values.
    dtype: of the memories, float32 or float64.
    source_dim: width of sources and queries; default key_dim.
    key_memory: `[heads, source, key]`; default zeros.
    value_memory: `[heads, key, value]`; default zeros.

  Raises:
    ValueError: `dtype` is narrower than float32.
  """
  del spec
  contract.check_state_dtype(dtype)

  def fill(initial, *shape):
    if initial is None:
      return jnp.zeros((batch, heads, *shape), dtype)
    return jnp.broadcast_to(initial.astype(dtype), (batch, heads, *shape))

  source_dim = key_dim if source_dim is None else source_dim
  return types.State(
    key_memory=fill(key_memory, source_dim, key_dim),
    value_memory=fill(value_memory, key_dim, value_dim),
    segment_id=jnp.zeros(batch, jnp.int32),
  )


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  del spec
  batch, heads, source_dim, key_dim = state.key_memory.shape
  widths = {
    "query": source_dim,
    "source": source_dim,
    "key": key_dim,
    "value": state.value_memory.shape[-1],
    "log_decay": 1,
    "write_rate": (1, 2),
  }
  if inputs.active is not None:
    widths["active"] = 1
  contract.check_inputs(inputs, batch, heads, widths)


chunk = IMPLEMENTATIONS.chunk(check_inputs)
