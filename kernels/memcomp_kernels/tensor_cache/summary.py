"""Tensor Cache in words."""

from memcomp_kernels import summaries
from memcomp_kernels.tensor_cache import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  return summaries.Summary(
    objective="`-<k A, v>`; `rule=delta`: `|k A' - v|^2 / 2`",
    update=(
      "`A <- lambda A + eta k^T v`; `rule=delta`: `v - k A'` for `v`; the layer"
      " adds `r = q A'` to softmax attention over a window, each by a"
      " projection of its own"
    ),
    chunk=(
      f"tokens of a chunk of {spec.chunk_size} read and correct `A'`, the"
      " memory before the chunk; `write_population=evicted`: a token is written"
      " as it leaves the window, `A'` is the memory before the token, exact at"
      " any tile"
    ),
    source=(
      "Tensor Cache, arXiv 2605.22884, eq. (1)-(5), chunks (8)-(9), options"
      " (10)-(14)"
    ),
    floats="H * (min(n, W) * (d_k + d_v) + m * d_k * d_v)",
    flops="H * (2 * (d_k + d_v) * w + 4 * m * d_k * d_v)",
  )
