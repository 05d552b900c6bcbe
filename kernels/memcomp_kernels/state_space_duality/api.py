"""State space duality: the memory of Mamba-2."""

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.state_space_duality import reference as _reference
from memcomp_kernels.state_space_duality import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "state_space_duality",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=dispatch.Kernel("memcomp_kernels.state_space_duality.mosaic_tpu"),
  mosaic_gpu=dispatch.Kernel("memcomp_kernels.state_space_duality.mosaic_gpu"),
)


def _check(spec, sizes, state):
  del state
  if sizes["heads"] % spec.heads_per_group:
    raise ValueError(
      f"heads_per_group={spec.heads_per_group} must divide"
      f" heads={sizes['heads']}"
    )


state_space_duality = op_lib.Op(
  name="state_space_duality",
  about="""
  The state space model of Mamba-2 (arXiv 2405.21060), also named `ssd`.

  `S <- exp(g) S + dt k v^T`, then `y = S^T q + D v`. In the paper's letters q
  is C, k is B, v is x, and g is dt A. Heads of a group share q and k.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  order=("q", "k", "v", "g"),
  names={"write_rate": "dt", "skip": "D"},
  check=_check,
)

init_state, step = state_space_duality.init_state, state_space_duality.step
chunk, reference = state_space_duality.chunk, state_space_duality.reference
