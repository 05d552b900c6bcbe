"""State space duality in words."""

from memcomp_kernels import summaries
from memcomp_kernels.state_space_duality import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  del spec
  return summaries.Summary(
    objective="`-<h^T B, x>`; `C`, `B`, `x` are query, key, value",
    update="`h <- exp(dt A) h + dt B x^T`; `y = h^T C + D x`",
    chunk="exact at any tile: matrix products",
    source="Mamba2, arXiv 2405.21060, eq. (1a)-(1b), chunks section 6",
    floats="H * d_k * d_v",
    flops="4 * H * d_k * d_v",
  )
