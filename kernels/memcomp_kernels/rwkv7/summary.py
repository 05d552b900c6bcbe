"""RWKV-7 in words."""

from memcomp_kernels import summaries
from memcomp_kernels.rwkv7 import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  del spec
  return summaries.Summary(
    objective=(
      "`|S^T kappa^ - v|^2 / 2` at a rate `a` of each channel, if"
      " `k~ = a * kappa^`; else what is removed and what is written are apart"
    ),
    update=(
      "`S <- diag(w) S - (a * kappa^) (S^T kappa^)^T + k~ v^T`;"
      " `y = scale S^T r`"
    ),
    chunk=(
      "exact at any tile: a unit-triangular system; its scores are made in"
      " blocks, as each channel has a decay of its own"
    ),
    source="RWKV-7, arXiv 2503.14456, eq. (17)-(18)",
    floats="H * d_k * d_v",
    flops="8 * H * d_k * d_v",
  )
