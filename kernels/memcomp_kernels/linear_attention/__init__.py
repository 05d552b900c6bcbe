"""Linear attention (arXiv 2006.16236), with an optional decay."""

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.linear_attention import reference, tile

__all__ = ["linear_attention"]


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  columns = "(d_v + 1)" if spec.normalize else "d_v"
  return op_lib.Facts(
    objective="`-<S^T phi(k), v>`",
    chunk="Exact at any tile: matrix products.",
    source=(
      "Linear attention, arXiv 2006.16236, eq. (18)-(20); with a decay RetNet,"
      " 2307.08621"
    ),
    floats=f"H * d_k * {columns}",
    flops=f"4 * H * d_k * {columns}",
  )


linear_attention = op_lib.Op.of(
  reference,
  name="linear_attention",
  about="""
  Linear attention (arXiv 2006.16236), with a decay where `g` is given.

  `S <- exp(g) S + f(k) v^T` and `z <- exp(g) z + f(k)`, then
  `y = S^T f(q) / (z . f(q) + eps)`, with f the feature map.
  flash-linear-attention leaves the feature map to the caller: its
  `chunk_linear_attn(normalize=False)` and `chunk_simple_gla` are
  `feature_map="identity", normalize=False`.
  """,
  forms={
    "xla_chunked": tile.chunk,
    "mosaic_tpu": dispatch.Kernel(
      "memcomp_kernels.pallas_tpu.affine.prepared", tile.chunk
    ),
  },
  facts=_facts,
  Tiling=form_lib.Tiling,
  order=("q", "k", "v", "g"),
)
