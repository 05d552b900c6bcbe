"""Online vector quantisation in words."""

from memcomp_kernels import summaries
from memcomp_kernels.ovq import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  return summaries.Summary(
    objective=(
      "`|K_i - k|^2 + |V_i - v|^2` summed over the tokens of row `i`, that of"
      " largest `<k, K_i>`: online k-means"
    ),
    update=(
      "tokens of a chunk that is whole: those least like any row found new ones"
      " by the schedule, the others join; a row is the mean of its `c_i`"
      " tokens; `y = [V; v_j]^T softmax([K q + log c; k_j q])`, `j` of the"
      " chunk so far"
    ),
    chunk=(
      f"a chunk of {spec.chunk_size} is attended to exactly, then joins as one;"
      " its tokens choose among the same rows, by a choice without a gradient"
    ),
    source=("OVQ, the baseline of arXiv 2605.09877, as in its authors' code"),
    floats="H * (r * (d_k + d_v + 1) + min(n, C) * (d_k + d_v))",
    flops="2 * H * (d_k + d_v) * (2 * R + w)",
  )
