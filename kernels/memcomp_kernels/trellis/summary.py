"""Trellis in words."""

from memcomp_kernels import summaries
from memcomp_kernels.trellis import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  return summaries.Summary(
    objective=(
      "`|phi(M w) - alpha|^2 / 2`: of `M_K` with `w = k`, of `M_V` with"
      " `w = v`; `alpha` is the token's code"
    ),
    update=(
      "`M <- beta M - gamma J_phi(M' w)^T (phi(M' w) - alpha) w^T`, both;"
      " `y = M_V^T f(M_K q)`"
    ),
    chunk=(
      f"gradients at `M'`, the memory before a chunk of {spec.chunk_size}"
      " tokens; `gradient_at=token`: at the memory before the token, exact at"
      " any tile, by substitution or by sweeps to a tolerance"
    ),
    source="Trellis, arXiv 2512.23852, eq. (5)-(9), chunks (11)-(12)",
    floats="H * m * (d_k + d_v)",
    flops="H * (6 * m * (d_k + d_v) + 2 * C * (d_k + d_v + 2 * m))",
  )
