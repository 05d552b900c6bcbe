"""RWKV-7: the delta rule with a decay and a rate per channel."""

import jax

from memcomp_kernels import op as op_lib
from memcomp_kernels import shapes
from memcomp_kernels.chunking import chunked
from memcomp_kernels.math import channel_decay
from memcomp_kernels.parallel import state_passing
from memcomp_kernels.rwkv7 import reference, tile

__all__ = ["rwkv7"]


def _make_state(
  spec: reference.Spec,
  sizes: shapes.StateSizes,
  *,
  memory: jax.Array | None = None,
) -> reference.State:
  """Makes the initial state; see `Op.init_state`.

  Args:
    spec: the memory's options.
    sizes: sizes and dtype of the state.
    memory: `[heads, key_dim, value_dim]`; default zeros.
  """
  del spec
  filled = sizes.filled(memory, sizes.key_dim, sizes.value_dim)
  return reference.State(filled, sizes.counts())


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  del spec
  return op_lib.Facts(
    objective=(
      "`|S^T kappa^ - v|^2 / 2` at a rate `a` of each channel, if"
      " `k~ = a * kappa^`; otherwise removed and written keys differ"
    ),
    chunk=(
      "Exact at any tile: a unit-triangular system. Scores are computed in"
      " blocks, because each channel has its own decay."
    ),
    source="RWKV-7, arXiv 2503.14456, eq. (17)-(18)",
    floats="H * d_k * d_v",
    # Removal, two writes and the read.
    flops="8 * H * d_k * d_v",
  )


rwkv7 = op_lib.Op.of(
  reference,
  name="rwkv7",
  about="""
  The memory of RWKV-7 (arXiv 2503.14456): a delta rule with decays by channel.

  `S <- diag(exp(w)) S - (rate * removal) (S^T removal)^T + k v^T`, then
  `y = scale S^T r`. flash-linear-attention's `chunk_rwkv7` takes
  `a = -removal_key` and `b = removal_key * write_rate` in place of these two.
  """,
  forms={
    "xla_chunked": chunked.implementation(tile.form),
  },
  facts=_facts,
  Tiling=channel_decay.Tiling,
  order=("r", "w", "k", "v"),
  names={"query": "r", "log_decay": "w"},
  make_state=_make_state,
  pass_state=lambda _: state_passing.linear,
)
