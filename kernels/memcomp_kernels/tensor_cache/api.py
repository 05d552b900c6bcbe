"""Tensor Cache: `init_state`, `step`, `chunk`, `reference` (see `contract`)."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.tensor_cache import (
  mosaic_gpu,
  mosaic_tpu,
  types,
  xla_chunked,
)
from memcomp_kernels.tensor_cache import over_time as _over_time
from memcomp_kernels.tensor_cache import reference as _reference

Inputs, Spec, State = types.Inputs, types.Spec, types.State
reference = _reference.reference
step = _reference.step
over_time = _over_time.over_time
unit = _reference.unit

IMPLEMENTATIONS = dispatch.Implementations(
  "tensor_cache",
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
  """Returns the state before the first token: all zeros.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: rows of the memory.
    value_dim: columns of the memory.
    dtype: of window and memory, float32 or float64.

  Raises:
    ValueError: `dtype` is narrower than float32, or the wedge rule's memory is
      not square.
  """
  contract.check_state_dtype(dtype)
  if spec.rule == "wedge" and key_dim != value_dim:
    raise ValueError(
      f'rule="wedge" needs key_dim={key_dim} and value_dim={value_dim} equal'
    )

  def zeros(*shape):
    return jnp.zeros((batch, heads, *shape), dtype)

  def memories():
    lanes = spec.timescales, spec.num_slots
    normalizer = zeros(*lanes, key_dim) if spec.read_norm else None
    return types.Memories(zeros(*lanes, key_dim, value_dim), normalizer)

  size = spec.window_size
  routes = zeros(size, spec.num_slots) if spec.routes_evicted else None
  return types.State(
    window=types.Window(zeros(size, key_dim), zeros(size, value_dim), routes),
    memories=memories(),
    starts=memories() if spec.chunked else None,
    sums=(
      types.Sums(zeros(key_dim), zeros(value_dim)) if spec.chunk_mean else None
    ),
    position=jnp.zeros(batch, jnp.int32),
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
  seen: int | None = None,
) -> tuple[types.State, jax.Array]:
  """Runs a Tensor Cache over many tokens; differentiable in state and inputs.

  Args:
    state: the state before the first token.
    inputs: `[batch, time, heads, dim]` arrays, see `types.Inputs`.
    spec: the memory's meaning.
    segment_ids: int32 `[batch, time]` for packed rows, 0 is padding.
    reset_state: what a new segment starts from; default `state`.
    implementation: "reference", "xla_chunked" or "mosaic_tpu"; default the
      fastest that runs on the platform.
    seen: an upper bound of `state.position` where one is known (0: the state is
      fresh): it saves work, and a wrong one loses tokens.

  Returns:
    The state after the last token, and `[batch, time, heads, 2 * value]` in
    the query's dtype: local attention, then the memory's read.

  Raises:
    NotImplementedError: the named implementation cannot run here.
    ValueError: shapes do not fit the state or each other.
  """
  check_inputs(state, inputs, spec)
  function = IMPLEMENTATIONS.select(implementation, (inputs, spec))
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
  batch, heads, timescales, slots, key_dim, value_dim = (
    state.memories.memory.shape
  )
  size = state.window.key.shape[2]
  made_for = {
    "window_size": (size, spec.window_size),
    "timescales": (timescales, spec.timescales),
    "num_slots": (slots, spec.num_slots),
    'write_population == "all"': (state.starts is not None, spec.chunked),
    "chunk_mean": (state.sums is not None, spec.chunk_mean),
    "read_norm": (state.memories.normalizer is not None, spec.read_norm),
    "routes in the window": (
      state.window.write_route is not None,
      spec.routes_evicted,
    ),
  }
  for name, (has, needs) in made_for.items():
    if has != needs:
      raise ValueError(
        f"the state was made with another spec: {name} is {has} there and"
        f" {needs} in spec"
      )
  route = spec.num_slots if spec.num_slots > 1 else None
  contract.check_inputs(
    inputs,
    batch,
    heads,
    {
      "query": key_dim,
      "key": key_dim,
      "value": value_dim,
      "log_decay": timescales,
      "write_rate": timescales,
      "write_route": route,
      "read_route": route,
      "read_mix": 1 if timescales > 1 else None,
    },
  )
