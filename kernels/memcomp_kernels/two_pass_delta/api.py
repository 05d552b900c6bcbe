"""The two-pass delta rule."""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.two_pass_delta import reference as _reference
from memcomp_kernels.two_pass_delta import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "two_pass_delta",
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
  source_dim: int | None = None,
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
) -> types.State:
  """Makes `init_state`.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys and codes.
    value_dim: width of values.
    dtype: of the memories.
    source_dim: width of sources and queries; default key_dim.
    key_memory: `[heads, source_dim, key_dim]`; default zeros.
    value_memory: `[heads, key_dim, value_dim]`; default zeros.
  """
  del spec

  def fill(initial, *shape):
    if initial is None:
      return jnp.zeros((batch, heads, *shape), dtype)
    return jnp.broadcast_to(initial.astype(dtype), (batch, heads, *shape))

  source_dim = key_dim if source_dim is None else source_dim
  return types.State(
    key_memory=fill(key_memory, source_dim, key_dim),
    value_memory=fill(value_memory, key_dim, value_dim),
    segment_id=jnp.zeros(batch, jnp.int32),
  )


two_pass_delta = op_lib.Op(
  name="two_pass_delta",
  about="""
  The two-pass delta rule: keys, then values, compressed by regression.

  The first pass answers `k` where it is asked `source`; the second answers `v`
  where it is asked the first one's code. Both are gated delta rules with weight
  decay. `y` is what the second answers to the code of `q`.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  make_state=_make_state,
)

init_state, step = two_pass_delta.init_state, two_pass_delta.step
chunk, reference = two_pass_delta.chunk, two_pass_delta.reference
