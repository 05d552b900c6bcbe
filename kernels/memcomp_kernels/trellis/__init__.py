"""Trellis: a two-pass key-value compression memory (arXiv 2512.23852)."""

import jax

from memcomp_kernels import dispatch, shapes
from memcomp_kernels import op as op_lib
from memcomp_kernels.chunking import chunked
from memcomp_kernels.trellis import reference, tile, tilings

__all__ = ["trellis"]


def _make_state(
  spec: reference.Spec,
  sizes: shapes.StateSizes,
  *,
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
) -> reference.State:
  """Makes the initial state; see `Op.init_state`.

  Args:
    spec: the memory's options.
    sizes: sizes and dtype of the state.
    key_memory: initial M_K `[heads, num_slots, key_dim]`; default zeros. A phi
      with a norm has a steep gradient at zero (1 / sqrt(phi_eps)).
    value_memory: initial M_V `[heads, num_slots, value_dim]`; default zeros.
  """
  memories = (
    sizes.filled(key_memory, spec.num_slots, sizes.key_dim),
    sizes.filled(value_memory, spec.num_slots, sizes.value_dim),
  )
  starts = memories if spec.chunked else (None, None)
  position = sizes.counts() if spec.chunked else None
  return reference.State(*memories, *starts, position, sizes.counts())


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  return op_lib.Facts(
    objective=(
      "`|phi(M w) - alpha|^2 / 2`: of `M_K` with `w = k`, of `M_V` with"
      " `w = v`; `alpha` is the token's code"
    ),
    chunk=(
      "Gradients are taken at `M'`, the memory before a chunk of"
      f" {spec.chunk_size} tokens. With `gradient_at=token` they are taken at"
      " the memory before the token: exact at any tile, by substitution or"
      " sweeps."
    ),
    source="Trellis, arXiv 2512.23852, eq. (5)-(9), chunks (11)-(12)",
    floats="H * m * (d_k + d_v)",
    # Both passes' z, write and read. Within a chunk, reads use two score
    # matrices per pass.
    flops="H * (6 * m * (d_k + d_v) + 2 * C * (d_k + d_v + 2 * m))",
    letters=lambda n: {
      "m": spec.num_slots,
      "C": spec.chunk_size * spec.chunked,
    },
  )


trellis = op_lib.Op.of(
  reference,
  name="trellis",
  about="""
  Trellis (arXiv 2512.23852): two memories of slots, compressed in two passes.

  The first pass learns to answer `k` by the code `target`, the second `v`, each
  by a gradient step of rate `write_rate` on `|phi(M w) - target|^2 / 2` after
  the decay `g`. Then `y = M_V^T f(M_K q)`.
  """,
  forms={
    "xla_chunked": chunked.implementation(tile.form),
    "mosaic_tpu": dispatch.Kernel("memcomp_kernels.trellis.pallas_tpu.engine"),
    "mosaic_gpu": dispatch.Kernel("memcomp_kernels.trellis.pallas_gpu.engine"),
  },
  tiled=("xla_chunked", "mosaic_tpu"),
  facts=_facts,
  make_state=_make_state,
  chunks=True,
  Tiling=tilings.Tiling,
)
