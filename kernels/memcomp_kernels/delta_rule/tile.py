"""The delta rule in chunk form on matrix units: the algebra of one tile.

Rows are tokens, S is the memory before the tile, E the rows of errors v - k S'
with S' the decayed memory that each token meets. With mu and Omega of
`math.decay`,

  (I + strict(Omega * K K^T) diag(beta)) E = V - diag(mu) K S
  O = diag(mu) Q S + A E,      A = (Omega * Q K^T) diag(beta)
  S <- mu_C S + K^T diag(Omega_C beta) E

All but S is known before the tiles are run, for all of them at once: with U and
W what the system makes of V and diag(mu) K (the papers' WY form),

  E = U - W S,      O = (diag(mu) Q - A W) S + A U
"""

import functools

import jax.numpy as jnp

from memcomp_kernels import affine
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.delta_rule import reference
from memcomp_kernels.math import decay, delta, matmul


def prepare(
  inputs: reference.Inputs, spec: reference.Spec, tiling: None
) -> affine.Tile:
  """Does what needs no memory, of inputs `[batch, heads, tile, dim]`."""
  del tiling
  query, key = inputs.query, inputs.key
  dtype = query.dtype
  product = functools.partial(matmul.product, dtype=dtype)
  wide = jnp.promote_types(dtype, jnp.float32)
  value, log_decay, rate = (
    x.astype(wide)
    for x in (inputs.value, inputs.log_decay[..., 0], inputs.write_rate)
  )
  if not spec.forget_gate:
    log_decay = jnp.zeros_like(log_decay)
  factors = decay.decay_factors(log_decay)
  share = factors.between * jnp.swapaxes(rate, -1, -2)
  from_start = factors.from_start[..., None]

  # The solve reads below the diagonal only, where what t meets is Omega_t.
  coupling = share * product("bhtk,bhik->bhti", key, key)
  target = jnp.concatenate([value, from_start * key], axis=-1)
  solved = delta.solve(coupling, target)
  error, error_key = jnp.split(solved, [value.shape[-1]], axis=-1)

  scale = spec.read_scale(key.shape[-1])
  scores = scale * share * product("bhtk,bhik->bhti", query, key)
  inner = product("bhti,bhik->bhtk", scores, error_key)
  return affine.Tile(
    write=error,
    erase=error_key.astype(dtype),
    key=(factors.to_end[..., None] * rate * key).astype(dtype),
    query=(scale * from_start * query - inner).astype(dtype),
    log_scale=None,  # scaled already: A W has no common factor with it
    output=product("bhti,bhiv->bhtv", scores, error),
    total=factors.total,
  )


def form(
  spec: reference.Spec, tiling: form_lib.Tiling | None, time: int
) -> form_lib.Form:
  """The memory under the chunk form."""
  return affine.form(prepare, spec, tiling, time)


chunk = chunked.implementation(form)
