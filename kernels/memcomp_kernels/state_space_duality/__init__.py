"""State space duality: the memory of Mamba2 (arXiv 2405.21060)."""

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.parallel import state_passing
from memcomp_kernels.state_space_duality import reference, tile

__all__ = ["state_space_duality"]


def _check(spec, sizes, state):
  del state
  if sizes["heads"] % spec.heads_per_group:
    raise ValueError(
      f"heads_per_group={spec.heads_per_group} must divide"
      f" heads={sizes['heads']}"
    )


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  del spec
  return op_lib.Facts(
    objective="`-<h^T B, x>`; `C`, `B`, `x` are query, key, value",
    chunk="Exact at any tile: matrix products.",
    source="Mamba2, arXiv 2405.21060, eq. (1a)-(1b), chunks section 6",
    floats="H * d_k * d_v",
    # Write and read.
    flops="4 * H * d_k * d_v",
  )


state_space_duality = op_lib.Op.of(
  reference,
  name="state_space_duality",
  about="""
  The state space model of Mamba-2 (arXiv 2405.21060), also named `ssd`.

  `S <- exp(g) S + dt k v^T`, then `y = S^T q + D v`. In the paper's letters q
  is C, k is B, v is x, and g is dt A. Heads of a group share q and k.
  """,
  forms={
    "xla_chunked": tile.chunk,
    "mosaic_tpu": dispatch.Kernel(
      "memcomp_kernels.state_space_duality.mosaic_tpu", tile.chunk
    ),
    "mosaic_gpu": dispatch.Kernel(
      "memcomp_kernels.pallas_gpu.affine.prepared", tile.chunk
    ),
  },
  facts=_facts,
  Tiling=form_lib.Tiling,
  order=("q", "k", "v", "g"),
  names={"write_rate": "dt", "skip": "D"},
  check=_check,
  pass_state=lambda _: state_passing.linear,
)
