"""Test-time training."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.test_time_training import reference as _reference
from memcomp_kernels.test_time_training import types, xla_chunked

Inputs, Layer, Spec, State = types.Inputs, types.Layer, types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "test_time_training",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
)


def _make_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int | None = None,
  dtype: Any,
  layers: types.Layers | None = None,
  norm_scale: jax.Array | None = None,
  norm_bias: jax.Array | None = None,
) -> types.State:
  """Makes `init_state`.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys.
    value_dim: width of values, the same.
    dtype: of the weights.
    layers: the inner model at first, `[heads, in, out]` and `[heads, out]` a
      layer, see `Spec.widths`; default zeros, from which "mlp" learns only the
      bias of its second layer.
    norm_scale: of the inner layer norm, `[heads, key_dim]`; default ones.
    norm_bias: of the inner layer norm, `[heads, key_dim]`; default zeros.

  Raises:
    ValueError: widths differ.
  """
  if value_dim not in (None, key_dim):
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


def _check(spec, sizes, state):
  if state is None:
    return
  widths = tuple(layer.weight.shape[2:] for layer in state.layers)
  if widths != spec.widths(sizes["key_dim"]):
    raise ValueError(
      f"test_time_training: the state has layers of {widths}, but"
      f" model={spec.model!r} with expansion={spec.expansion} has"
      f" {spec.widths(sizes['key_dim'])}"
    )


test_time_training = op_lib.Op(
  name="test_time_training",
  about="""
  Test-time training (arXiv 2407.04620): a memory that is a small model.

  It is also named `ttt`.

  The inner model takes a gradient step of rate `eta` on `|f(k) - v|^2 / 2` for
  every token, then `y = f(q)`, with `f(x) = x + LN(model(x))`. A fresh model
  and its norm can be given as `layers`, `norm_scale` and `norm_bias`;
  flash-linear-attention's `chunk_ttt_linear` calls the last two `w` and `b`.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  names={"write_rate": "eta"},
  make_state=_make_state,
  constants=("norm_scale", "norm_bias"),
  check=_check,
)

init_state, step = test_time_training.init_state, test_time_training.step
chunk, reference = test_time_training.chunk, test_time_training.reference
