"""Test-time training: a memory that is a small model (arXiv 2407.04620)."""

import jax

from memcomp_kernels import op as op_lib
from memcomp_kernels import shapes
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.test_time_training import reference, tile

__all__ = ["test_time_training"]


def _make_state(
  spec: reference.Spec,
  sizes: shapes.StateSizes,
  *,
  layers: reference.Layers | None = None,
  norm_scale: jax.Array | None = None,
  norm_bias: jax.Array | None = None,
) -> reference.State:
  """Makes the initial state; see `Op.init_state`.

  Args:
    spec: the memory's options.
    sizes: sizes and dtype of the state. Keys and values are equally wide.
    layers: the initial inner model, `[heads, in, out]` and `[heads, out]` per
      layer, see `Spec.widths`. The default is zeros, from which "mlp" learns
      only the bias of its second layer.
    norm_scale: scale of the inner layer norm, `[heads, key_dim]`; default ones.
    norm_bias: bias of the inner layer norm, `[heads, key_dim]`; default zeros.

  Raises:
    ValueError: the widths differ.
  """
  key_dim, value_dim = sizes.key_dim, sizes.value_dim
  if value_dim not in (None, key_dim):
    raise ValueError(
      f"key_dim={key_dim} and value_dim={value_dim} must be equal: the inner"
      " model answers x + LN(model(x))"
    )
  widths = spec.widths(key_dim)
  given = layers or [(None, None)] * len(widths)
  if len(given) != len(widths) or any(len(layer) != 2 for layer in given):
    raise ValueError(
      f"layers must be {len(widths)} of (weight, bias), as model={spec.model!r}"
      " has"
    )
  filled = tuple(
    reference.Layer(sizes.filled(weight, *width), sizes.filled(bias, width[1]))
    for (weight, bias), width in zip(given, widths, strict=True)
  )
  return reference.State(
    layers=filled,
    starts=filled if spec.chunked else None,
    position=sizes.counts() if spec.chunked else None,
    norm_scale=sizes.filled(norm_scale, key_dim, default=1.0),
    norm_bias=sizes.filled(norm_bias, key_dim),
    segment_id=sizes.counts(),
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


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  if spec.model == "linear":
    name, model = "TTT-Linear", "x W + b"
    exact = "by substitution"
    floats = "H * d_k * (d_k + 1)"
    flops = "H * (6 * d_k**2 + 4 * C * d_k)"
  else:
    name, model = "TTT-MLP", "gelu(x W_1 + b_1) W_2 + b_2"
    exact = "token by token over the tile's rows"
    floats = "H * d_k * (2 * e * d_k + e + 1)"
    flops = "H * (14 * e * d_k**2 + 4 * (1 + e) * C * d_k)"
  return op_lib.Facts(
    objective=f"`l(W) = |f(k; W) - v|^2 / 2`, `f(x; W) = x + LN({model})`",
    chunk=(
      "Gradients are taken at `W'`, the weights before a chunk of"
      f" {spec.chunk_size} tokens. With `gradient_at=token` they are taken at"
      f" the weights before the token: exact at any tile, {exact}."
    ),
    source=(
      f"{name}, arXiv 2407.04620, eq. (4)-(6), section 2.7, and released code"
    ),
    floats=floats,
    # The inner model on key and query, gradients and write. Within a chunk,
    # reads use a score matrix per inner layer.
    flops=flops,
    letters=lambda n: {
      "C": spec.chunk_size * spec.chunked,
      "e": spec.expansion,
    },
  )


test_time_training = op_lib.Op.of(
  reference,
  name="test_time_training",
  about="""
  Test-time training (arXiv 2407.04620): a memory that is a small model.

  It is also named `ttt`.

  The inner model takes a gradient step of rate `eta` on `|f(k) - v|^2 / 2` for
  every token, then `y = f(q)`, with `f(x) = x + LN(model(x))`. A fresh model
  and its norm can be given as `layers`, `norm_scale` and `norm_bias`;
  flash-linear-attention's `chunk_ttt_linear` calls the last two `w` and `b`.
  """,
  forms={
    "xla_chunked": chunked.implementation(tile.form),
  },
  facts=_facts,
  Tiling=form_lib.Tiling,
  names={"write_rate": "eta"},
  make_state=_make_state,
  chunks=True,
  constants=("norm_scale", "norm_bias"),
  check=_check,
)
