"""Linear attention, normalised or not, with a decay if asked for."""

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.linear_attention import reference as _reference
from memcomp_kernels.linear_attention import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "linear_attention",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=dispatch.Kernel("memcomp_kernels.linear_attention.mosaic_tpu"),
)

linear_attention = op_lib.Op(
  name="linear_attention",
  about="""
  Linear attention (arXiv 2006.16236), with a decay where `g` is given.

  `S <- exp(g) S + f(k) v^T` and `z <- exp(g) z + f(k)`, then
  `y = S^T f(q) / (z . f(q) + eps)`, with f the feature map.
  flash-linear-attention leaves the feature map to the caller: its
  `chunk_linear_attn(normalize=False)` and `chunk_simple_gla` are
  `feature_map="identity", normalize=False`.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  order=("q", "k", "v", "g"),
)

init_state, step = linear_attention.init_state, linear_attention.step
chunk, reference = linear_attention.chunk, linear_attention.reference
