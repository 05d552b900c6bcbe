"""Two-pass delta rule: keys, then values, compressed by regression."""

import jax

from memcomp_kernels import op as op_lib
from memcomp_kernels import shapes
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.two_pass_delta import reference, tile

__all__ = ["two_pass_delta"]


def _make_state(
  spec: reference.Spec,
  sizes: shapes.StateSizes,
  *,
  source_dim: int | None = None,
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
) -> reference.State:
  """Makes the initial state; see `Op.init_state`.

  Args:
    spec: the memory's options.
    sizes: sizes and dtype of the state.
    source_dim: width of sources and queries; default key_dim.
    key_memory: `[heads, source_dim, key_dim]`; default zeros.
    value_memory: `[heads, key_dim, value_dim]`; default zeros.
  """
  del spec
  source_dim = sizes.key_dim if source_dim is None else source_dim
  return reference.State(
    key_memory=sizes.filled(key_memory, source_dim, sizes.key_dim),
    value_memory=sizes.filled(value_memory, sizes.key_dim, sizes.value_dim),
    segment_id=sizes.counts(),
  )


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  del spec
  return op_lib.Facts(
    objective=(
      "`|S_K^T x - k|^2 / 2`, then `|S_V^T c - v|^2 / 2` of the code"
      " `c = nsilu(S_K^T x)`"
    ),
    chunk="Exact at any tile: two unit-triangular systems in turn.",
    source=(
      "an unofficial description of Trellis (2512.23852); the published Trellis"
      " differs from it"
    ),
    floats="H * d_k * (d_k + d_v)",
    # Error, write and read of both passes, and another read of the first for
    # the token's code.
    flops="H * d_k * (8 * d_k + 6 * d_v)",
  )


two_pass_delta = op_lib.Op.of(
  reference,
  name="two_pass_delta",
  about="""
  The two-pass delta rule: keys, then values, compressed by regression.

  The first pass answers `k` where it is asked `source`; the second answers `v`
  where it is asked the first one's code. Both are gated delta rules with weight
  decay. `y` is what the second answers to the code of `q`.
  """,
  forms={
    "xla_chunked": chunked.implementation(tile.form),
  },
  facts=_facts,
  Tiling=form_lib.Tiling,
  make_state=_make_state,
)
