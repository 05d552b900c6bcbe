"""Lattice: slots on the unit sphere, written along tangents (2504.05646)."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch, shapes
from memcomp_kernels import op as op_lib
from memcomp_kernels.lattice import reference, tile, tilings

__all__ = ["lattice"]


def orthonormal_slots(
  key: jax.Array,
  *,
  heads: int,
  value_dim: int,
  num_slots: int,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Returns random orthonormal columns, the paper's initial memory.

  Returns:
    `[heads, value_dim, num_slots]`.

  Raises:
    ValueError: there are more slots than dimensions.
  """
  if num_slots > value_dim:
    raise ValueError(
      f"num_slots={num_slots} must be at most value_dim={value_dim} for"
      " orthonormal slots; pass an initial memory instead"
    )
  random = jax.random.normal(key, (heads, value_dim, num_slots), dtype)
  return jnp.linalg.qr(random)[0]


def _make_state(
  spec: reference.Spec,
  sizes: shapes.StateSizes,
  *,
  memory: jax.Array | None = None,
) -> reference.State:
  """Makes the initial state; see `Op.init_state`.

  Args:
    spec: the memory's options.
    sizes: sizes and dtype of the state. `key_dim` is ignored, because a Lattice
      key is a code over the slots, `spec.num_slots` wide.
    memory: initial S `[heads, value_dim, num_slots]`; default
      `orthonormal_slots` of a fixed key. With the "normalized" update its
      columns are normalised. A zero column then stays zero until it is written.

  Raises:
    ValueError: the default memory cannot have that many slots.
  """
  dtype, slots = sizes.dtype, spec.num_slots
  if memory is None:
    memory = orthonormal_slots(
      jax.random.key(0),
      heads=sizes.heads,
      value_dim=sizes.value_dim,
      num_slots=slots,
      dtype=dtype,
    )
  memory = sizes.filled(memory, sizes.value_dim, slots)
  if spec.unit_columns:
    memory = reference.normalize(memory, memory)
  return reference.State(
    memory=memory,
    memory_start=memory if spec.chunked else None,
    write_rate_sum=sizes.filled(None) if spec.sums_rates else None,
    position=sizes.counts() if spec.chunked else None,
    segment_id=sizes.counts(),
  )


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  return op_lib.Facts(
    objective=(
      "`|Phi k - v|^2`, `Phi` the slots `s_i` at length 1; or"
      " `|Phi^T v - k|^2`, or `-<Phi^T v, k>` (`objective`)"
    ),
    chunk=(
      f"`Phi` is the slots before a chunk of {spec.chunk_size} tokens. Slots"
      " get length 1 at its end. With `gradient_at=token` it is the slots"
      " before the token: exact at any tile, by substitution or sweeps."
    ),
    source="Lattice, arXiv 2504.05646 v1, eq. (6)-(14), (16); chunks are ours",
    floats="H * m * d_v",
    # Loss, tangent, write and read. Within a chunk, reads use a score matrix
    # that is weighted slot by slot.
    flops="H * (8 * m * d_v + C * (3 * m + 2 * d_v))",
    letters=lambda n: {
      "m": spec.num_slots,
      "C": spec.chunk_size * spec.chunked,
    },
  )


lattice = op_lib.Op.of(
  reference,
  name="lattice",
  about="""
  Lattice (arXiv 2504.05646): slots on the unit sphere, written along tangents.

  Columns of the memory are slots. A token writes `v` under the code `k` by a
  gradient step of rate `write_rate` that keeps every column's length, after the
  decay `g`; then `y = S q`. `q` and `k` are codes over the slots.
  """,
  forms={
    "xla_chunked": tile.chunk,
    "mosaic_tpu": dispatch.Kernel(
      "memcomp_kernels.lattice.pallas_tpu.engine",
    ),
    "mosaic_gpu": dispatch.Kernel("memcomp_kernels.lattice.pallas_gpu.engine"),
  },
  tiled=("xla_chunked", "mosaic_tpu"),
  facts=_facts,
  make_state=_make_state,
  chunks=True,
  Tiling=tilings.Tiling,
)
