"""Trellis: `init_state`, `step`, `chunk`, `reference` (see `contract`)."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.primitives import triangular
from memcomp_kernels.trellis import (
  mosaic_gpu,
  mosaic_tpu,
  tilings,
  types,
  xla_chunked,
)
from memcomp_kernels.trellis import reference as _reference

Inputs, Spec, State = types.Inputs, types.Spec, types.State
Tiling = tilings.Tiling
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "trellis",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=mosaic_tpu.chunk,
  mosaic_gpu=mosaic_gpu.chunk,
  limits={
    "mosaic_tpu": dispatch.tiled(mosaic_tpu.unsupported),
    "mosaic_gpu": dispatch.tiled(mosaic_gpu.unsupported, only=Tiling()),
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
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
) -> types.State:
  """Returns the state before the first token.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: columns of the key memory.
    value_dim: columns of the value memory.
    dtype: of the memories, float32 or float64.
    key_memory: initial M_K `[heads, slots, key]`; default zeros. phi with a
      norm has a steep gradient at zero (algorithms: 1 / sqrt(phi_eps)).
    value_memory: initial M_V `[heads, slots, value]`; default zeros.

  Raises:
    ValueError: `dtype` is narrower than float32.
  """
  contract.check_state_dtype(dtype)

  def memory(initial, dim):
    shape = (batch, heads, spec.num_slots, dim)
    if initial is None:
      return jnp.zeros(shape, dtype)
    return jnp.broadcast_to(initial.astype(dtype), shape)

  memories = memory(key_memory, key_dim), memory(value_memory, value_dim)
  starts = memories if spec.stale else (None, None)
  position = jnp.zeros(batch, jnp.int32) if spec.stale else None
  return types.State(*memories, *starts, position, jnp.zeros(batch, jnp.int32))


def chunk(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
  implementation: str | None = None,
  tiling: tilings.Tiling | None = None,
) -> tuple[types.State, jax.Array]:
  """Runs Trellis over many tokens; differentiable in state and inputs.

  Args:
    state: the state before the first token.
    inputs: `[batch, time, heads, dim]` arrays, see `types.Inputs`.
    spec: the memory's meaning.
    segment_ids: int32 `[batch, time]` for packed rows, 0 is padding.
    reset_state: what a new segment starts from; default `state`.
    implementation: "reference", "xla_chunked", "mosaic_tpu" or "mosaic_gpu";
      default the fastest that can do the call on the platform.
    tiling: how it is evaluated: speed alone.

  Returns:
    The state after the last token, and y `[batch, time, heads, value]` in the
    query's dtype.

  Raises:
    NotImplementedError: the named implementation cannot run here.
    ValueError: shapes do not fit the state or each other.
  """
  return run(
    state,
    inputs,
    spec=spec,
    segment_ids=segment_ids,
    reset_state=reset_state,
    implementation=implementation,
    tiling=tiling,
  )[:2]


def run(
  state: types.State,
  inputs: types.Inputs,
  *,
  spec: types.Spec,
  segment_ids: jax.Array | None = None,
  reset_state: types.State | None = None,
  implementation: str | None = None,
  tiling: tilings.Tiling | None = None,
) -> tuple[types.State, jax.Array, triangular.Stats | None]:
  """As `chunk`; also returns how tiles were solved, `[batch, heads]`.

  None where there was nothing to solve: stale gradients, the token scan. TPU
  kernels tell nothing: zeros per token.

  Raises:
    NotImplementedError: also for a `tiling` of another implementation.
  """
  check_inputs(state, inputs, spec)
  function = IMPLEMENTATIONS.select(implementation, (inputs, spec, tiling))
  arguments: dict[str, Any] = {
    "spec": spec,
    "segment_ids": segment_ids,
    "reset_state": reset_state,
  }
  if function is xla_chunked.chunk:
    return xla_chunked.run(state, inputs, tiling=tiling, **arguments)
  if function is mosaic_tpu.chunk:
    result = mosaic_tpu.chunk(state, inputs, tiling=tiling, **arguments)
    rows = state.key_memory.shape[:2]
    return (*result, None if spec.stale else triangular.no_stats(rows))
  if tiling not in (None, tilings.Tiling()):
    raise NotImplementedError(
      f"{implementation} has no {tiling}: leave tiling out"
    )
  return (*function(state, inputs, **arguments), None)


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, slots, key_dim = state.key_memory.shape
  value_dim = state.value_memory.shape[-1]
  if slots != spec.num_slots:
    raise ValueError(
      f"the state has {slots} slots, spec.num_slots is {spec.num_slots}"
    )
  if (state.position is not None) != spec.stale:
    made_for = "chunk starts" if state.position is not None else "tokens"
    raise ValueError(
      f"the state was made for gradients at {made_for}; make it with the same"
      f" spec: gradient_at={spec.gradient_at!r}, chunk_size={spec.chunk_size}"
    )
  gates = (1, 2)
  widths = {
    "query": key_dim,
    "key": key_dim,
    "value": value_dim,
    "target": slots,
    "log_decay": gates,
    "write_rate": gates,
  }
  if inputs.log_phi_eps is not None:
    widths["log_phi_eps"] = 1
  contract.check_inputs(inputs, batch, heads, widths)
