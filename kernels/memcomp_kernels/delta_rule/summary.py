"""The delta rule in words."""

from memcomp_kernels import summaries
from memcomp_kernels.delta_rule import types


def summary(spec: types.Spec) -> summaries.Summary:
  """A row of docs/memories.md."""
  if spec.forget_gate:
    objective = "`|(alpha S)^T k - v|^2 / 2`, after the decay"
    update = "`S <- alpha S + beta k (v - (alpha S)^T k)^T`"
    source = "Gated DeltaNet, arXiv 2412.06464, section 3.1, chunks 3.3"
  else:
    objective = "`|S^T k - v|^2 / 2`"
    update = "`S <- S + beta k (v - S^T k)^T`"
    source = (
      "DeltaNet, arXiv 2406.06484, chunks section 3.2; first in 2102.11174"
    )
  return summaries.Summary(
    objective=objective,
    update=f"{update}; `y = scale S^T q`",
    chunk="exact at any tile: a unit-triangular system (WY form)",
    source=source,
    floats="H * d_k * d_v",
    flops="6 * H * d_k * d_v",
  )
