"""Slot attention: Gated Slot Attention, and bounded-memory control."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.slot_attention import reference as _reference
from memcomp_kernels.slot_attention import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State

IMPLEMENTATIONS = dispatch.Implementations(
  "slot_attention",
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
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
  log_total: jax.Array | None = None,
) -> types.State:
  """Makes `init_state`.

  Args:
    spec: the memory's meaning.
    batch: rows.
    heads: heads.
    key_dim: width of keys.
    value_dim: width of values.
    dtype: of the memory.
    key_memory: `[heads, num_slots, key_dim]`; default zeros, as published.
    value_memory: `[heads, num_slots, value_dim]`; default zeros.
    log_total: with rule "softmax", `[heads, num_slots]`: the log of the weight
      that the two memories have beside a token of logit 0; default none.
  """

  def fill(initial, *shape, default=0.0):
    if initial is None:
      return jnp.full((batch, heads, *shape), default, dtype)
    return jnp.broadcast_to(initial.astype(dtype), (batch, heads, *shape))

  slots = spec.num_slots
  total = None
  if spec.rule == "softmax":
    total = fill(log_total, slots, default=types.EMPTY)
  return types.State(
    key_memory=fill(key_memory, slots, key_dim),
    value_memory=fill(value_memory, slots, value_dim),
    log_total=total,
    segment_id=jnp.zeros(batch, jnp.int32),
  )


slot_attention = op_lib.Op(
  name="slot_attention",
  about="""
  Slot attention: a bounded memory, read by two softmax passes.

  With `g` it is Gated Slot Attention (arXiv 2409.07146): slot i takes up
  `1 - exp(g_i)` of a token. With `s` it is attention with bounded-memory
  control (arXiv 2110.02488): slot i is a softmax average over tokens by
  `exp(s_i)`. Then `y = sum_i p_i V_i`, `p = softmax(scale K q)`.
  flash-linear-attention's `chunk_gsa` and `chunk_abc` scale by key_dim ** -0.5:
  that is `scale=None` here.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  names={"write_logit": "s"},
  make_state=_make_state,
)

gated_slot_attention = dataclasses.replace(
  slot_attention,
  name="gated_slot_attention",
  about="""
  Gated Slot Attention (arXiv 2409.07146).

  Slot i takes up `1 - exp(g_i)` of a token: `K_i <- exp(g_i) K_i + (1 -
  exp(g_i)) k`, and V_i the same of v; then `y = sum_i p_i V_i`,
  `p = softmax(scale K q)`. flash-linear-attention's `chunk_gsa` takes the share
  `s = 1 - exp(g)` beside `g`, and scales by key_dim ** -0.5: that is
  `scale=None` here.
  """,
  fixed={"rule": "gated"},
)

init_state, step = slot_attention.init_state, slot_attention.step
chunk, reference = slot_attention.chunk, slot_attention.reference
