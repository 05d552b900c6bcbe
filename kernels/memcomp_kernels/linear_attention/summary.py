"""Linear attention in words."""

from memcomp_kernels import summaries
from memcomp_kernels.linear_attention import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  del spec
  return summaries.Summary(
    objective="`-<S^T phi(k), v>`",
    update=(
      "`S <- S + phi(k) v^T`, `z <- z + phi(k)`;"
      " `y = S^T f / (z . f + eps)`, `f = scale phi(q)`, `phi = elu + 1`"
    ),
    chunk="exact at any tile: matrix products",
    source=(
      "Linear attention, arXiv 2006.16236, eq. (18)-(20); with a decay RetNet,"
      " 2307.08621"
    ),
    floats="H * d_k * (d_v + 1)",
    flops="4 * H * d_k * (d_v + 1)",
  )
