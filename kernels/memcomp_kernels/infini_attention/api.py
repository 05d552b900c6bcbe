"""Infini-attention."""

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.infini_attention import reference as _reference
from memcomp_kernels.infini_attention import types, xla_chunked

Association, Inputs = types.Association, types.Inputs
Spec, State = types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "infini_attention",
  options={"seen": ("reference", "xla_chunked")},
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
)

infini_attention = op_lib.Op(
  name="infini_attention",
  about="""
  Infini-attention (arXiv 2404.07143): local attention beside a linear memory.

  A token reads softmax attention over its segment (or a window), and the memory
  of all segments before. `read_gate` mixes the two.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
)

init_state, step = infini_attention.init_state, infini_attention.step
chunk, reference = infini_attention.chunk, infini_attention.reference
