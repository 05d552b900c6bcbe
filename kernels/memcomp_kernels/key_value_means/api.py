"""Key-Value Means: `init_state`, `step`, `chunk`, `reference`, `resize`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcomp_kernels import contract, dispatch
from memcomp_kernels.key_value_means import (
  budgets,
  mosaic_tpu,
  types,
  xla_chunked,
)
from memcomp_kernels.key_value_means import reference as _reference

Inputs, Spec, State = types.Inputs, types.Spec, types.State
FixedBudget = budgets.FixedBudget
PowerLawBudget = budgets.PowerLawBudget
SaturatingBudget = budgets.SaturatingBudget
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "key_value_means",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=mosaic_tpu.chunk,
  limits={"mosaic_tpu": mosaic_tpu.unsupported},
)


def capacity(spec: types.Spec, length: int) -> int:
  """The rows that a state needs for sequences of `length` tokens.

  Never less than `spec.chunk_size`, the least that a state can have.
  """
  if length < 1:
    raise ValueError(f"length={length} must be at least 1")
  live = spec.live_rows((length - 1) // spec.chunk_size)
  return max(live[-1], spec.chunk_size)


def init_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  dtype: Any = jnp.float32,
  length: int | None = None,
  temperatures: jax.Array | None = None,
  norm_scale: jax.Array | None = None,
  norm_bias: jax.Array | None = None,
) -> types.State:
  """Returns the state before the first token.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys, more than `spec.rotary_dim`.
    value_dim: width of values.
    dtype: of the memory, float32 or float64.
    length: tokens that the state shall hold as the budget says; its capacity
      caps the budget of longer sequences. Default `spec.max_length`.
    temperatures: (tau_state, tau_window), `[heads, 2]`; default ones.
    norm_scale: of LN_s, `[key]` or `[heads, key]`; default ones.
    norm_bias: of LN_s, `[key]` or `[heads, key]`; default zeros.

  Raises:
    ValueError: `dtype` is narrower than float32, `rotary_dim` leaves nothing
      of a key, or `length` is less than 1.
  """
  contract.check_state_dtype(dtype)
  _check_rotary_dim(spec, key_dim)
  rows = capacity(spec, spec.max_length if length is None else length)

  def zeros(*shape):
    return jnp.zeros((batch, heads, *shape), dtype)

  def constant(given, default, size):
    if given is None:
      return jnp.full((batch, heads, size), default, dtype)
    return jnp.broadcast_to(given.astype(dtype), (batch, heads, size))

  return types.State(
    keys=zeros(rows, key_dim),
    values=zeros(rows, value_dim),
    radii=zeros(rows),
    length=jnp.zeros(batch, jnp.int32),
    window_keys=zeros(spec.window, key_dim),
    window_values=zeros(spec.window, value_dim),
    window_gates=zeros(spec.window),
    position=jnp.zeros(batch, jnp.int32),
    temperatures=constant(temperatures, 1, 2),
    norm_scale=constant(norm_scale, 1, key_dim),
    norm_bias=constant(norm_bias, 0, key_dim),
    segment_id=jnp.zeros(batch, jnp.int32),
  )


def resize(state: types.State, capacity: int) -> types.State:
  """Gives a state another capacity, between two calls.

  Args:
    state: any.
    capacity: rows that it shall have; live rows must fit. Where `state` is
      traced they are unknown, and those that do not fit are lost.

  Raises:
    ValueError: live rows do not fit.
  """
  live = _known(state.length)
  if live is not None and live > capacity:
    raise ValueError(
      f"capacity={capacity} must be at least {live}, the rows that are live"
    )

  def fit(x):
    missing = max(capacity - x.shape[2], 0)
    padding = [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3)
    return jnp.pad(x[:, :, :capacity], padding)

  return state._replace(
    keys=fit(state.keys), values=fit(state.values), radii=fit(state.radii)
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
  """Runs the memory over many tokens; differentiable in state and inputs.

  Args:
    state: the state before the first token.
    inputs: `[batch, time, heads, dim]` arrays, see `types.Inputs`.
    spec: the memory's meaning.
    segment_ids: int32 `[batch, time]` for packed rows, 0 is padding.
    reset_state: what a new segment starts from, a state before any token;
      default `state`.
    implementation: "reference", "xla_chunked" or "mosaic_tpu"; default the
      fastest that runs on the platform.
    seen: a bound on `state.position`, 0 for a state before any token. Time
      then follows the rows that are live and not the state's capacity; the
      result is the same. A bound that does not hold gives wrong results
      where `state` is traced, and an error where it is not.

  Returns:
    The state after the last token, and y `[batch, time, heads, value]` in the
    query's dtype.

  Raises:
    NotImplementedError: the named implementation cannot run here.
    ValueError: shapes do not fit the state or each other, or `seen` does not
      hold.
  """
  check_inputs(state, inputs, spec)
  if seen is not None:
    position = _known(state.position)
    if seen < 0 or (position is not None and position > seen):
      raise ValueError(
        f"seen={seen} must be at least state.position, {position}"
      )
  function = IMPLEMENTATIONS.select(implementation, (state, inputs, spec))
  return function(
    state,
    inputs,
    spec=spec,
    segment_ids=segment_ids,
    reset_state=reset_state,
    seen=seen,
  )


def _known(counts: jax.Array) -> int | None:
  """The greatest of some counts, None where this process cannot see them."""
  if isinstance(counts, jax.core.Tracer) or not counts.is_fully_addressable:
    return None
  return int(np.asarray(counts).max())


def _check_rotary_dim(spec: types.Spec, key_dim: int) -> None:
  if spec.rotary_dim >= key_dim:
    raise ValueError(
      f"rotary_dim={spec.rotary_dim} must be less than the {key_dim} channels"
      " of a key: nothing would be left of it in the memory"
    )


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, rows, key_dim = state.keys.shape
  value_dim = state.values.shape[-1]
  window = state.window_keys.shape[2]
  if window != spec.window:
    raise ValueError(
      f"the state has a window of {window} tokens, the spec one of"
      f" {spec.window}: chunk_size={spec.chunk_size},"
      f" window_chunks={spec.window_chunks}"
    )
  if rows < spec.chunk_size:
    raise ValueError(
      f"the state has {rows} rows, the first chunk alone needs"
      f" chunk_size={spec.chunk_size}"
    )
  _check_rotary_dim(spec, key_dim)
  contract.check_inputs(
    inputs,
    batch,
    heads,
    {"query": key_dim, "key": key_dim, "value": value_dim, "merge_gate": 1},
  )
