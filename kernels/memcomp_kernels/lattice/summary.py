"""Lattice in words."""

from memcomp_kernels import summaries
from memcomp_kernels.lattice import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  return summaries.Summary(
    objective=(
      "`|Phi k - v|^2`, `Phi` the slots `s_i` at length 1; or"
      " `|Phi^T v - k|^2`, or `-<Phi^T v, k>` (`objective`)"
    ),
    update=(
      "`s_i <- b_i (mu s_i + d_i)`, `d_i = -gamma k_i P_i (Phi k - v)`,"
      " `P_i = I - Phi_i Phi_i^T`, `b_i = (mu^2 + |d_i|^2)^(-1/2)`: the length"
      " stays 1 where `Phi` is the slots themselves; `y = S q`"
    ),
    chunk=(
      f"`Phi` is the slots before a chunk of {spec.chunk_size} tokens, at its"
      " end slots are brought to length 1; `gradient_at=token`: the slots"
      " before the token, exact at any tile, by substitution or by sweeps to a"
      " tolerance"
    ),
    source="Lattice, arXiv 2504.05646 v1, eq. (6)-(14), (16); chunks are ours",
    floats="H * m * d_v",
    flops="H * (8 * m * d_v + C * (3 * m + 2 * d_v))",
  )
