"""Online vector quantisation."""

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.ovq import reference as _reference
from memcomp_kernels.ovq import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "ovq",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
)

ovq = op_lib.Op(
  name="ovq",
  about="""
  Online vector quantisation: attention over a growing dictionary of means.

  A token attends to the tokens of its chunk and to the rows of the dictionary.
  When a chunk is complete its tokens update the rows that are nearest to them,
  or become new rows. Keys have length 1, and queries come scaled.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
)

init_state, step = ovq.init_state, ovq.step
chunk, reference = ovq.chunk, ovq.reference
