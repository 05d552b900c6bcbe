"""Lattice."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.lattice import columns, tilings, types, xla_chunked
from memcomp_kernels.lattice import reference as _reference

Inputs, Spec, State = types.Inputs, types.Spec, types.State
Tiling = tilings.Tiling

IMPLEMENTATIONS = dispatch.Implementations(
  "lattice",
  options={"tiling": ("xla_chunked", "mosaic_tpu")},
  reference=_reference.reference,
  xla_chunked=xla_chunked.run,
  mosaic_tpu=dispatch.Kernel(
    "memcomp_kernels.lattice.pallas_tpu.engine",
    asks=("inputs", "spec", "tiling"),
    function="run",
  ),
  mosaic_gpu=dispatch.Kernel("memcomp_kernels.lattice.pallas_gpu.engine"),
)


def orthonormal_slots(
  key: jax.Array,
  *,
  heads: int,
  value_dim: int,
  num_slots: int,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Random orthonormal columns, the paper's initial memory.

  Returns:
    `[heads, value_dim, num_slots]`.

  Raises:
    ValueError: more slots than dimensions.
  """
  if num_slots > value_dim:
    raise ValueError(
      f"num_slots={num_slots} must be at most value_dim={value_dim} for"
      " orthonormal slots; pass an initial memory instead"
    )
  random = jax.random.normal(key, (heads, value_dim, num_slots), dtype)
  return jnp.linalg.qr(random)[0]


def _make_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  value_dim: int,
  key_dim: int | None = None,
  dtype: Any,
  memory: jax.Array | None = None,
) -> types.State:
  """Makes `init_state`.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    value_dim: rows of the memory.
    key_dim: ignored, part of every memory's signature: a Lattice key is a code
      over the slots, `spec.num_slots` wide.
    dtype: of the memory.
    memory: initial S `[heads, value_dim, num_slots]`, whose columns are
      normalised where the update is "normalized" (a zero column there stays
      zero until it is written); default `orthonormal_slots` of a fixed key.

  Raises:
    ValueError: the default memory cannot have as many slots.
  """
  del key_dim
  slots = spec.num_slots
  if memory is None:
    memory = orthonormal_slots(
      jax.random.key(0),
      heads=heads,
      value_dim=value_dim,
      num_slots=slots,
      dtype=dtype,
    )
  memory = memory.astype(dtype)
  if spec.unit_columns:
    memory = columns.normalize(memory, memory)
  memory = jnp.broadcast_to(memory, (batch, heads, value_dim, slots))
  return types.State(
    memory=memory,
    memory_start=memory if spec.stale else None,
    write_rate_sum=jnp.zeros((batch, heads), dtype)
    if spec.sums_rates
    else None,
    position=jnp.zeros(batch, jnp.int32) if spec.stale else None,
    segment_id=jnp.zeros(batch, jnp.int32),
  )


lattice = op_lib.Op(
  name="lattice",
  about="""
  Lattice (arXiv 2504.05646): slots on the unit sphere, written along tangents.

  Columns of the memory are slots. A token writes `v` under the code `k` by a
  gradient step of rate `write_rate` that keeps every column's length, after the
  decay `g`; then `y = S q`. `q` and `k` are codes over the slots.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  make_state=_make_state,
)

init_state, step = lattice.init_state, lattice.step
chunk, reference = lattice.chunk, lattice.reference
run = lattice.run
