"""Trellis."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.trellis import reference as _reference
from memcomp_kernels.trellis import tilings, types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
Tiling = tilings.Tiling

IMPLEMENTATIONS = dispatch.Implementations(
  "trellis",
  options={"tiling": ("xla_chunked", "mosaic_tpu")},
  reference=_reference.reference,
  xla_chunked=xla_chunked.run,
  mosaic_tpu=dispatch.Kernel(
    "memcomp_kernels.trellis.pallas_tpu.engine", function="run"
  ),
  mosaic_gpu=dispatch.Kernel("memcomp_kernels.trellis.pallas_gpu.engine"),
)


def _make_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  dtype: Any,
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
) -> types.State:
  """Makes `init_state`.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: columns of the key memory.
    value_dim: columns of the value memory.
    dtype: of the memories.
    key_memory: initial M_K `[heads, num_slots, key_dim]`; default zeros. phi
      with a norm has a steep gradient at zero (1 / sqrt(phi_eps)).
    value_memory: initial M_V `[heads, num_slots, value_dim]`; default zeros.
  """

  def memory(initial, dim):
    shape = (batch, heads, spec.num_slots, dim)
    if initial is None:
      return jnp.zeros(shape, dtype)
    return jnp.broadcast_to(initial.astype(dtype), shape)

  memories = memory(key_memory, key_dim), memory(value_memory, value_dim)
  starts = memories if spec.stale else (None, None)
  position = jnp.zeros(batch, jnp.int32) if spec.stale else None
  return types.State(*memories, *starts, position, jnp.zeros(batch, jnp.int32))


trellis = op_lib.Op(
  name="trellis",
  about="""
  Trellis (arXiv 2512.23852): two memories of slots, compressed in two passes.

  The first pass learns to answer `k` by the code `target`, the second `v`, each
  by a gradient step of rate `write_rate` on `|phi(M w) - target|^2 / 2` after
  the decay `g`. Then `y = M_V^T f(M_K q)`.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  make_state=_make_state,
)

init_state, step = trellis.init_state, trellis.step
chunk, reference = trellis.chunk, trellis.reference
run = trellis.run
