"""Test-time training: `init_state`, `step`, `chunk`, `reference`."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.test_time_training import reference as _reference
from memcomp_kernels.test_time_training import types, xla_chunked

Inputs, Layer, Spec, State = types.Inputs, types.Layer, types.Spec, types.State
reference = _reference.reference
step = _reference.step

IMPLEMENTATIONS = dispatch.Implementations(
  "test_time_training",
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
  layers: types.Layers | None = None,
  norm_scale: jax.Array | None = None,
  norm_bias: jax.Array | None = None,
) -> types.State:
  """Returns the state before the first token.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys.
    value_dim: width of values, the same.
    dtype: of the weights, float32 or float64.
    layers: the inner model at first, `[heads, in, out]` and `[heads, out]` a
      layer, see `Spec.widths`; default zeros, from which "mlp" learns only the
      bias of its second layer.
    norm_scale: of the inner layer norm, `[heads, dim]`; default ones.
    norm_bias: likewise; default zeros.

  Raises:
    ValueError: `dtype` is narrower than float32, or widths differ.
  """
  contract.check_state_dtype(dtype)
  if key_dim != value_dim:
    raise ValueError(
      f"key_dim={key_dim} and value_dim={value_dim} must be equal: the inner"
      " model answers x + LN(model(x))"
    )

  def fill(initial, *shape, default=0.0):
    if initial is None:
      return jnp.full((batch, heads, *shape), default, dtype)
    return jnp.broadcast_to(initial.astype(dtype), (batch, heads, *shape))

  widths = spec.widths(key_dim)
  filled = tuple(
    types.Layer(fill(weight, *width), fill(bias, width[1]))
    for (weight, bias), width in zip(
      layers or [(None, None)] * len(widths), widths, strict=True
    )
  )
  integer = jnp.zeros(batch, jnp.int32)
  return types.State(
    layers=filled,
    starts=filled if spec.stale else None,
    position=integer if spec.stale else None,
    norm_scale=fill(norm_scale, key_dim, default=1.0),
    norm_bias=fill(norm_bias, key_dim),
    segment_id=integer,
  )


def check_inputs(
  state: types.State, inputs: types.Inputs, spec: types.Spec
) -> None:
  """Raises ValueError where shapes of `inputs` and `state` do not fit."""
  batch, heads, dim = state.norm_scale.shape
  widths = tuple(layer.weight.shape[2:] for layer in state.layers)
  if widths != spec.widths(dim):
    raise ValueError(
      f"the state has layers of {widths}, but model={spec.model!r} with"
      f" expansion={spec.expansion} has {spec.widths(dim)}"
    )
  if (state.position is not None) != spec.stale:
    made_for = "chunk starts" if state.position is not None else "tokens"
    raise ValueError(
      f"the state was made for gradients at {made_for}; make it with the same"
      f" spec: gradient_at={spec.gradient_at!r}, chunk_size={spec.chunk_size}"
    )
  if inputs.step_scale is not None and not spec.stale:
    raise ValueError(
      "step_scale is for gradients at chunk starts; scale write_rate instead"
    )
  widths = {
    name: dim if name in ("query", "key", "value") else 1
    for name, x in inputs._asdict().items()
    if x is not None
  }
  contract.check_inputs(inputs, batch, heads, widths)


chunk = IMPLEMENTATIONS.chunk(check_inputs)
