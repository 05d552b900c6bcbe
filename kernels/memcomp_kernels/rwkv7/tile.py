"""The algebra of one tile of RWKV-7, as matrix products.

Rows are tokens. K, V, R, Kappa are keys, values, queries and removal keys, B =
a * Kappa, and S is the memory before the tile. G are the running sums of log w,
per token and channel. With the scores (`math.channel_decay`)

  A(X, Y)_{t,i} = sum_c X_{t,c} Y_{i,c} exp(G_{t,c} - G_{i,c}),   i <= t

and A^-, the same with G_{t-1} for G_t and i < t, tokens remove the values U:

  (I + A^-(Kappa, B)) U = (Kappa * e^{G^-}) S + A^-(Kappa, K) V

The system is unit triangular (`math.delta`). Then

  P = (R * e^G) S + A(R, K) V - A(R, B) U
  S <- e^{G_C} S + (K * e^{G_C - G})^T V - (B * e^{G_C - G})^T U

To compute A^-, rows are shifted up by one token, A is computed, and its rows
are shifted down again.
"""

import functools

import jax
import jax.numpy as jnp

from memcomp_kernels import contract, dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.math import channel_decay, delta

TILING = channel_decay.Tiling(block_time=4)
"""Default sizes. On a CPU blocks of 4 are the fastest of 4, 8 and 16."""


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of the memory."""
  tiling = call.tiling or TILING
  return form_lib.Form(
    spec=call.spec,
    tiling=tiling,
    tile_time=channel_decay.tile_time(tiling, call.inputs.query.shape[1]),
    run_tile=run,
    memories=("memory",),
  )


def run(
  call: form_lib.TileCall,
) -> tuple[form_lib.Memories, jax.Array, None]:
  """Writes and reads one tile; see `Form.run_tile`. The memory is S."""
  inputs, spec, tiling = call.inputs, call.spec, call.tiling
  dtype = inputs.query.dtype
  product = functools.partial(contract.product, dtype=dtype)
  (S,) = call.memories
  r, k, v, kappa, log_decay, a = (x.astype(S.dtype) for x in inputs)
  b = a * kappa
  decay = channel_decay.channel_decay(log_decay, tiling.block_time)
  scores = functools.partial(channel_decay.scores, decay, dtype=dtype)
  read = functools.partial(channel_decay.read, decay, dtype=dtype)

  # Row t of a shifted array is token t + 1, which sees the decay up to t.
  ahead = _moved(kappa, -1)
  base = _moved(read(ahead, k, v), 1)
  before = decay.from_start[..., :-1, :]
  before = jnp.concatenate([jnp.ones_like(before[..., :1, :]), before], axis=-2)
  base = base + product("bhtk,bhkv->bhtv", before * kappa, S)
  removed = delta.solve(_moved(scores(ahead, b), 1), base)

  p = product("bhtk,bhkv->bhtv", decay.from_start * r, S)
  p = p + read(r, k, v) - read(r, b, removed)
  p = contract.read_scale(spec, k.shape[-1]) * p
  S = decay.total[..., None] * S
  S = S + product("bhtk,bhtv->bhkv", decay.to_end * k, v)
  S = S - product("bhtk,bhtv->bhkv", decay.to_end * b, removed)
  return (S,), p.astype(dtype), None


def _moved(x: jax.Array, by: int) -> jax.Array:
  """Shifts rows `[..., time, dim]` down by one, or up; zeros fill the gap."""
  zeros = jnp.zeros_like(x[..., :1, :])
  if by > 0:
    return jnp.concatenate([zeros, x[..., :-1, :]], axis=-2)
  return jnp.concatenate([x[..., 1:, :], zeros], axis=-2)
