"""RWKV-7's memory."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.rwkv7 import reference as _reference
from memcomp_kernels.rwkv7 import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "rwkv7",
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
)


def _make_state(
  spec: types.Spec,
  *,
  batch: int,
  heads: int,
  key_dim: int,
  value_dim: int,
  dtype: Any,
  memory: jax.Array | None = None,
) -> types.State:
  """Makes `init_state`.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys.
    value_dim: width of values.
    dtype: of the memory.
    memory: `[heads, key_dim, value_dim]`; default zeros.
  """
  del spec
  shape = batch, heads, key_dim, value_dim
  if memory is None:
    filled = jnp.zeros(shape, dtype)
  else:
    filled = jnp.broadcast_to(memory.astype(dtype), shape)
  return types.State(filled, jnp.zeros(batch, jnp.int32))


rwkv7 = op_lib.Op(
  name="rwkv7",
  about="""
  The memory of RWKV-7 (arXiv 2503.14456): a delta rule with decays by channel.

  `S <- diag(exp(w)) S - (rate * removal) (S^T removal)^T + k v^T`, then
  `y = scale S^T r`. flash-linear-attention's `chunk_rwkv7` takes
  `a = -removal_key` and `b = removal_key * write_rate` in place of these two.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  order=("r", "w", "k", "v"),
  names={"query": "r", "log_decay": "w"},
  make_state=_make_state,
)

init_state, step = rwkv7.init_state, rwkv7.step
chunk, reference = rwkv7.chunk, rwkv7.reference
