"""Key-Value Means in words."""

from memcomp_kernels import summaries
from memcomp_kernels.key_value_means import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  return summaries.Summary(
    objective=(
      "none by gradient: a token joins the row of largest `<kbar, LN(K_i)>`,"
      " `kbar` the normalised key without its rotary channels"
    ),
    update=(
      "tokens leaving the window: those least like any row found new ones up"
      " to the budget, the others `K_i += g kbar`, `V_i += g v` of theirs;"
      " `y = [rho V / |V|; v]^T softmax([tau_s LN(K); tau_w k] q / sqrt(d_k))`"
      " over rows and window"
    ),
    chunk=(
      f"chunks of {spec.chunk_size} leave a window of {spec.window_chunks} of"
      " them, as the next one begins; a chunk's tokens choose among the same"
      " rows, by a choice without a gradient"
    ),
    source=(
      "Key-Value Means, arXiv 2605.09877 v3, eq. (1)-(4), Append, Merge,"
      " Readout"
    ),
    floats="H * (r + min(n, W)) * (d_k + d_v + 1)",
    flops="2 * H * (d_k + d_v) * (2 * R + w)",
  )
