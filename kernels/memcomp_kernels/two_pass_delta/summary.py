"""The two-pass delta rule in words."""

from memcomp_kernels import summaries
from memcomp_kernels.two_pass_delta import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  del spec
  return summaries.Summary(
    objective=(
      "`|S_K^T x - k|^2 / 2`, then `|S_V^T c - v|^2 / 2` of the code"
      " `c = nsilu(S_K^T x)`"
    ),
    update=(
      "`S <- max(1 - alpha - theta lambda, 0) S - theta w (S^T w - u)^T`: `S_K`"
      " with `w, u = x, k`, then `S_V` with `c, v`; `y = S_V^T nsilu(S_K^T q)`"
    ),
    chunk="exact at any tile: two unit-triangular systems, one after the other",
    source=(
      "a third party's description of Trellis (2512.23852), which is another"
      " memory"
    ),
    floats="H * d_k * (d_k + d_v)",
    flops="H * d_k * (8 * d_k + 6 * d_v)",
  )
