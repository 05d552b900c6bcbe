"""The algebra of one tile of slot attention, as matrix products.

Rows are tokens. W are the writes w, and G the running sums of log a, both per
token and slot. K~, V~ are the memories before the tile. With

  D_{r,i} = exp(G_r - G_i) <= 1 for i <= r, per slot   (`channel_decay`)

  first pass    O = e^{G - G_0} * (Q K~^T) + sum_{i<=r} (q_r . k_i) w_i D_{r,i}
                P = softmax over slots of scale O
  second pass   Y = (P * e^{G - G_0}) V~ + sum_{i<=r} (P_r . w_i D_{r,i}) v_i

  K~ <- e^{G_C - G_0} K~ + (W * e^{G_C - G})^T K,   V~ in the same way

"gated" has G the cumulative log decay and w = 1 - alpha. "softmax" has G = -z,
which is known without a sum of differences, and w = exp(s - z).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.math import channel_decay
from memcomp_kernels.slot_attention import reference


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of the memory."""
  spec, tiling = call.spec, call.tiling or channel_decay.DEFAULT
  total = ("log_total",) if spec.rule == "softmax" else ()
  return form_lib.Form(
    spec=spec,
    tiling=tiling,
    tile_time=channel_decay.tile_time(tiling, call.inputs.query.shape[1]),
    run_tile=run,
    memories=("key_memory", "value_memory", *total),
  )


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, None]:
  """Writes and reads one tile; see `Form.run_tile`.

  The memories are K~, V~ and, with "softmax", z.
  """
  inputs, spec, tiling = call.inputs, call.spec, call.tiling
  dtype = inputs.query.dtype
  product = functools.partial(contract.product, dtype=dtype)
  K, V, *totals = call.memories
  q, k, v = inputs.query, inputs.key, inputs.value
  if inputs.log_decay is not None:
    log_decay = inputs.log_decay.astype(K.dtype)
    decay = channel_decay.channel_decay(log_decay, tiling.block_time)
    w = -jnp.expm1(log_decay)
  else:
    s, (before,) = jnp.asarray(inputs.write_logit, K.dtype), totals
    # Empty places hold zeros, and a write logit of zero is a write.
    s = jnp.where(call.valid[:, None, :, None], s, 2 * reference.EMPTY)
    # A log of a sum of zeros, as -inf writes them, has no derivative.
    s = jnp.maximum(s, 2 * reference.EMPTY)
    z = jnp.logaddexp(before[..., None, :], lax.cumlogsumexp(s, axis=2))
    decay = channel_decay.of_sums(-before, -z, tiling.block_time)
    w = jnp.exp(s - z)
    totals = [z[..., -1, :]]

  scores = decay.from_start * product("bhrk,bhmk->bhrm", q, K)
  matches = product("bhrk,bhik->bhri", q, k)
  scores = scores + channel_decay.read_into(decay, matches, w, dtype)
  p = jax.nn.softmax(contract.read_scale(spec, q.shape[-1]) * scores, axis=-1)
  y = product("bhrm,bhmv->bhrv", p * decay.from_start, V)
  y = y + channel_decay.read(decay, p, w, v, dtype)

  kept, last = decay.total[..., None], decay.to_end * w
  K = kept * K + product("bhim,bhik->bhmk", last, k)
  V = kept * V + product("bhim,bhiv->bhmv", last, v)
  return (K, V, *totals), y.astype(dtype), None


chunk = chunked.implementation(form)
