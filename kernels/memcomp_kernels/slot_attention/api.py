"""Slot attention: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.slot_attention import reference as _reference
from memcomp_kernels.slot_attention import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "slot_attention",
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
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
  log_total: jax.Array | None = None,
) -> types.State:
  """Returns the state before the first token.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys.
    value_dim: width of values.
    dtype: of the memory, float32 or float64.
    key_memory: `[heads, slots, key]`; default zeros, as published.
    value_memory: `[heads, slots, value]`; likewise.
    log_total: with "softmax", `[heads, slots]`: the log of the weight that the
      two memories have beside a token of logit 0; default none.

  Raises:
    ValueError: `dtype` is narrower than float32.
  """
  contract.check_state_dtype(dtype)

  def fill(initial, *shape, default=0.0):
    if initial is None:
      return jnp.full((batch, heads, *shape), default, dtype)
    return jnp.broadcast_to(initial.astype(dtype), (batch, heads, *shape))

  slots = spec.num_slots
  total = None
  if spec.rule == "softmax":
    total = fill(log_total, slots, default=types.EMPTY)
  return types.State(
    key_memory=fill(key_memory, slots, key_dim),
    value_memory=fill(value_memory, slots, value_dim),
    log_total=total,
    segment_id=jnp.zeros(batch, jnp.int32),
  )


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, slots, key_dim = state.key_memory.shape
  if slots != spec.num_slots:
    raise ValueError(
      f"the state has {slots} slots, spec.num_slots is {spec.num_slots}"
    )
  gated = spec.rule == "gated"
  if (state.log_total is None) != gated:
    raise ValueError(f"the state was not made for rule={spec.rule!r}")
  contract.check_inputs(
    inputs,
    batch,
    heads,
    {
      "query": key_dim,
      "key": key_dim,
      "value": state.value_memory.shape[-1],
      "log_decay": slots if gated else None,
      "write_logit": None if gated else slots,
    },
  )


chunk = IMPLEMENTATIONS.chunk(check_inputs)
