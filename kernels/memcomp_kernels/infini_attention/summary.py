"""Infini-attention in words."""

from memcomp_kernels import summaries
from memcomp_kernels.infini_attention import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  return summaries.Summary(
    objective=(
      "`|sigma(k) M' / d - v|^2 / 2`, `d = sigma(k) z' + eps` held fixed, at"
      " rate `d`; `rule=linear`: `-<sigma(k) M, v>`"
    ),
    update=(
      "`M <- M + sigma(k)^T (v - sigma(k) M' / d)`, `z <- z + sigma(k)`;"
      " `y = g sigma(q) M' / (sigma(q) z' + eps) + (1 - g) y_local`, of softmax"
      " attention; `sigma = elu + 1`"
    ),
    chunk=(
      f"segments of {spec.segment_size} tokens read and correct `M'`, `z'`, the"
      " memory before the segment, and attend within it; `segment_size=1`: the"
      " memory before the token, exact at any tile"
    ),
    source="Infini-attention, arXiv 2404.07143, eq. (3)-(6)",
    floats="H * (min(n, C) * (d_k + d_v) + d_k * (d_v + 1))",
    flops="H * (2 * (d_k + d_v) * w + 6 * d_k * d_v)",
  )
