"""Slot attention in words."""

from memcomp_kernels import summaries
from memcomp_kernels.slot_attention import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  write = "`K_i <- (1 - w_i) K_i + w_i k`, `V_i <- (1 - w_i) V_i + w_i v`"
  if spec.rule == "gated":
    gates = "`w_i = 1 - alpha_i`, a decay of token and slot"
    source = "Gated Slot Attention, arXiv 2409.07146, eq. (6)-(7)"
    floats = "H * m * (d_k + d_v)"
  else:
    gates = (
      "`w_i = exp(s_i - z_i)`, `z_i <- log(exp z_i + exp s_i)` first: an"
      " average over all tokens"
    )
    source = (
      "ABC, arXiv 2110.02488, eq. (4)-(6), over the sum of weights as released"
    )
    floats = "H * m * (d_k + d_v + 1)"
  return summaries.Summary(
    objective="`sum_i w_i (|K_i - k|^2 + |V_i - v|^2) / 2`, at rate 1",
    update=f"{write}; {gates}; `y = V^T softmax(scale K q)`",
    chunk=(
      "exact at any tile: matrix products between blocks, pairs of tokens in"
      " one, as each slot has a decay of its own"
    ),
    source=source,
    floats=floats,
    flops="4 * H * m * (d_k + d_v)",
  )
