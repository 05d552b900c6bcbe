"""Slot attention: bounded memories read by two softmax passes (GSA, ABC)."""

import dataclasses

import jax

from memcomp_kernels import op as op_lib
from memcomp_kernels import shapes
from memcomp_kernels.math import channel_decay
from memcomp_kernels.slot_attention import reference, tile

__all__ = ["gated_slot_attention", "slot_attention"]


def _make_state(
  spec: reference.Spec,
  sizes: shapes.StateSizes,
  *,
  key_memory: jax.Array | None = None,
  value_memory: jax.Array | None = None,
  log_total: jax.Array | None = None,
) -> reference.State:
  """Makes the initial state; see `Op.init_state`.

  Args:
    spec: the memory's options.
    sizes: sizes and dtype of the state.
    key_memory: `[heads, num_slots, key_dim]`; default zeros, as published.
    value_memory: `[heads, num_slots, value_dim]`; default zeros.
    log_total: with rule "softmax", `[heads, num_slots]`, the log of the weight
      that the two memories have relative to a token of logit 0. The default is
      no weight.
  """
  slots, total = spec.num_slots, None
  if spec.rule == "softmax":
    total = sizes.filled(log_total, slots, default=reference.EMPTY)
  return reference.State(
    key_memory=sizes.filled(key_memory, slots, sizes.key_dim),
    value_memory=sizes.filled(value_memory, slots, sizes.value_dim),
    log_total=total,
    segment_id=sizes.counts(),
  )


def _facts(spec: reference.Spec) -> op_lib.Facts:
  """Returns the facts of the memory; see `Op.facts`."""
  if spec.rule == "gated":
    weights = "`w_i = 1 - alpha_i`, a decay of token and slot"
    source = "Gated Slot Attention, arXiv 2409.07146, eq. (6)-(7)"
    floats = "H * m * (d_k + d_v)"
  else:
    weights = "`w_i` makes slots averages over all tokens"
    source = (
      "ABC, arXiv 2110.02488, eq. (4)-(6), over the sum of weights as released"
    )
    floats = "H * m * (d_k + d_v + 1)"
  return op_lib.Facts(
    objective=(
      f"`sum_i w_i (|K_i - k|^2 + |V_i - v|^2) / 2`, at rate 1; {weights}"
    ),
    chunk=(
      "Exact at any tile: matrix products between blocks, pairs of tokens"
      " within one, because each slot has its own decay."
    ),
    source=source,
    floats=floats,
    flops="4 * H * m * (d_k + d_v)",
    letters=lambda n: {"m": spec.num_slots},
  )


slot_attention = op_lib.Op.of(
  reference,
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
  forms={
    "xla_chunked": tile.chunk,
  },
  facts=_facts,
  Tiling=channel_decay.Tiling,
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
