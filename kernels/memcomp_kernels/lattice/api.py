"""Lattice: `init_state`, `step`, `chunk`, `reference` (see `contract`)."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.lattice import (
  columns,
  mosaic_gpu,
  mosaic_tpu,
  tilings,
  types,
  xla_chunked,
)
from memcomp_kernels.lattice import reference as _reference
from memcomp_kernels.primitives import triangular

Inputs, Spec, State = types.Inputs, types.Spec, types.State
Tiling = tilings.Tiling
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "lattice",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=mosaic_tpu.chunk,
  mosaic_gpu=mosaic_gpu.chunk,
  limits={
    "mosaic_tpu": dispatch.tiled(mosaic_tpu.unsupported),
    "mosaic_gpu": dispatch.tiled(mosaic_gpu.unsupported, only=Tiling()),
  },
)


def orthonormal_slots(
  key: jax.Array,
  *,
  heads: int,
  value_dim: int,
  num_slots: int,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Random orthonormal columns, the paper's initial memory.

  Returns:
    `[heads, value, slots]`.

  Raises:
    ValueError: more slots than dimensions.
  """
  if num_slots > value_dim:
    raise ValueError(
      f"num_slots={num_slots} must be at most value_dim={value_dim} for"
      " orthonormal slots; pass an initial memory instead"
    )
  random = jax.random.normal(key, (heads, value_dim, num_slots), dtype)
  return jnp.linalg.qr(random)[0]


def init_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  value_dim: int,
  key_dim: int | None = None,
  dtype: Any = jnp.float32,
  memory: jax.Array | None = None,
) -> types.State:
  """Returns the state before the first token.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    value_dim: rows of the memory.
    key_dim: ignored, part of every memory's signature: a Lattice key is a code
      over the slots, `spec.num_slots` wide.
    dtype: of the memory, float32 or float64.
    memory: initial S `[heads, value, slots]`, whose columns are normalised
      where the update is "normalized" (a zero column there stays zero until it
      is written); default `orthonormal_slots` of a fixed key.

  Raises:
    ValueError: `dtype` is narrower than float32, or the default memory cannot
      have as many slots.
  """
  del key_dim
  contract.check_state_dtype(dtype)
  slots = spec.num_slots
  if memory is None:
    memory = orthonormal_slots(
      jax.random.key(0),
      heads=heads,
      value_dim=value_dim,
      num_slots=slots,
      dtype=dtype,
    )
  memory = memory.astype(dtype)
  if spec.unit_columns:
    memory = columns.normalize(memory, memory)
  memory = jnp.broadcast_to(memory, (batch, heads, value_dim, slots))
  return types.State(
    memory=memory,
    memory_start=memory if spec.stale else None,
    write_rate_sum=jnp.zeros((batch, heads), dtype)
    if spec.sums_rates
    else None,
    position=jnp.zeros(batch, jnp.int32) if spec.stale else None,
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
  tiling: tilings.Tiling | None = None,
) -> tuple[types.State, jax.Array]:
  """Runs Lattice over many tokens; differentiable in state and inputs.

  Args:
    state: the state before the first token.
    inputs: `[batch, time, heads, dim]` arrays, see `types.Inputs`.
    spec: the memory's meaning.
    segment_ids: int32 `[batch, time]` for packed rows, 0 is padding.
    reset_state: what a new segment starts from; default `state`.
    implementation: "reference", "xla_chunked", "mosaic_tpu" or "mosaic_gpu";
      default the fastest that can do the call on the platform.
    tiling: how gradients per token are evaluated: speed alone.

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
  kernels solve nothing: zeros per token.

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
    none = None if spec.stale else triangular.no_stats(state.memory.shape[:2])
    return (*result, none)
  if tiling not in (None, tilings.Tiling()):
    raise NotImplementedError(
      f"{implementation} has no {tiling}: leave tiling out"
    )
  return (*function(state, inputs, **arguments), None)


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, value_dim, slots = state.memory.shape
  if slots != spec.num_slots:
    raise ValueError(
      f"the state has {slots} slots, spec.num_slots is {spec.num_slots}"
    )
  has = state.position is not None, state.write_rate_sum is not None
  if has != (spec.stale, spec.sums_rates):
    made_for = "chunk starts" if state.position is not None else "tokens"
    raise ValueError(
      f"the state was made for gradients at {made_for}; make it with the same"
      f" spec: gradient_at={spec.gradient_at!r}, chunk_size={spec.chunk_size},"
      f" sparsity={spec.sparsity}"
    )
  contract.check_inputs(
    inputs,
    batch,
    heads,
    {
      "query": slots,
      "key": slots,
      "value": value_dim,
      "log_decay": 1,
      "write_rate": 1,
    },
  )
