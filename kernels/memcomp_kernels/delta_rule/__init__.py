"""The delta rule: DeltaNet (arXiv 2406.06484), Gated DeltaNet (2412.06464)."""

import dataclasses

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.delta_rule import reference, tile
from memcomp_kernels.parallel import state_passing

__all__ = ["delta_rule", "gated_delta_rule"]


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  if spec.forget_gate:
    objective = "`|(alpha S)^T k - v|^2 / 2`, after the decay"
    source = "Gated DeltaNet, arXiv 2412.06464, section 3.1, chunks 3.3"
  else:
    objective = "`|S^T k - v|^2 / 2`"
    source = (
      "DeltaNet, arXiv 2406.06484, chunks section 3.2; first in 2102.11174"
    )
  return op_lib.Facts(
    objective=objective,
    chunk="Exact at any tile: a unit-triangular system (WY form).",
    source=source,
    floats="H * d_k * d_v",
    # Prediction, write and read.
    flops="6 * H * d_k * d_v",
  )


delta_rule = op_lib.Op.of(
  reference,
  name="delta_rule",
  about="""
  The delta rule of DeltaNet (arXiv 2406.06484).

  `S <- S + beta k (v - S^T k)^T`, then `y = scale S^T q`: a token corrects what
  the memory predicts wrongly. Arguments are those of flash-linear-attention's
  `chunk_delta_rule`; keys are not normalised here, as there by default.
  """,
  forms={
    "xla_chunked": tile.chunk,
    "mosaic_tpu": dispatch.Kernel(
      "memcomp_kernels.delta_rule.mosaic_tpu", tile.chunk
    ),
    "mosaic_gpu": dispatch.Kernel(
      "memcomp_kernels.pallas_gpu.affine.prepared", tile.chunk
    ),
  },
  facts=_facts,
  Tiling=form_lib.Tiling,
  order=("q", "k", "v", "beta"),
  names={"write_rate": "beta"},
  fixed={"forget_gate": False},
  pass_state=lambda _: state_passing.linear,
)

gated_delta_rule = dataclasses.replace(
  delta_rule,
  name="gated_delta_rule",
  about="""
  The gated delta rule of Gated DeltaNet (arXiv 2412.06464).

  `S <- exp(g) S + beta k (v - (exp(g) S)^T k)^T`, then `y = scale S^T q`: the
  memory decays, and a token corrects what it predicts wrongly. Arguments are
  those of flash-linear-attention's `chunk_gated_delta_rule`; keys are not
  normalised here, as there by default.
  """,
  order=("q", "k", "v", "g", "beta"),
  fixed={"forget_gate": True},
)
