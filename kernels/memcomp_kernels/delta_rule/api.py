"""The delta rule, with a decay and without."""

import dataclasses

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.delta_rule import reference as _reference
from memcomp_kernels.delta_rule import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "delta_rule",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=dispatch.Kernel("memcomp_kernels.delta_rule.mosaic_tpu"),
  mosaic_gpu=dispatch.Kernel("memcomp_kernels.delta_rule.mosaic_gpu"),
)

_either = op_lib.Op(
  name="delta_rule",
  about="""
  The delta rule, with a decay (Gated DeltaNet) or without (DeltaNet).
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  names={"write_rate": "beta"},
)

gated_delta_rule = dataclasses.replace(
  _either,
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

delta_rule = dataclasses.replace(
  _either,
  name="delta_rule",
  about="""
  The delta rule of DeltaNet (arXiv 2406.06484).

  `S <- S + beta k (v - S^T k)^T`, then `y = scale S^T q`: a token corrects what
  the memory predicts wrongly. Arguments are those of flash-linear-attention's
  `chunk_delta_rule`; keys are not normalised here, as there by default.
  """,
  order=("q", "k", "v", "beta"),
  fixed={"forget_gate": False},
)

init_state, step = _either.init_state, _either.step
chunk, reference = _either.chunk, _either.reference
