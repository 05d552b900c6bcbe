"""Softmax attention in words."""

from memcomp_kernels import summaries
from memcomp_kernels.softmax_attention import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  kept = "n" if spec.window_size is None else "min(n, W)"
  return summaries.Summary(
    objective=("none: tokens are kept; `y` minimises `sum_j p_j |y - v_j|^2`"),
    update=(
      "keep `k`, `v`, let the oldest go with a window; `y = sum_j p_j v_j`,"
      " `p = softmax_j(scale <q, k_j>)`"
    ),
    chunk="exact at any tile",
    source=(
      "Attention, arXiv 1706.03762, eq. (1); with shared keys and values"
      " 2305.13245, with sinks StreamingLLM, 2309.17453"
    ),
    floats=f"G * {kept} * (d_k + d_v)",
    flops="2 * H * (d_k + d_v) * w",
  )
