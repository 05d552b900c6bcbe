"""The algebra of one tile of the delta rule, as matrix products.

Rows are tokens. S is the memory before the tile. The rows of E are the errors v
- k S', with S' the decayed memory that each token meets. With mu and Omega of
`math.decay`,

  (I + strict(Omega * K K^T) diag(beta)) E = V - diag(mu) K S
  O = diag(mu) Q S + A E,      A = (Omega * Q K^T) diag(beta)
  S <- mu_C S + K^T diag(Omega_C beta) E

Only S depends on earlier tiles, so everything else is computed for all tiles at
once. Let U and W be the solutions of the system for V and for diag(mu) K (the
papers' WY form). Then

  E = U - W S,      O = (diag(mu) Q - A W) S + A U
"""

import functools

import jax.numpy as jnp

from memcomp_kernels import affine, contract, dispatch
from memcomp_kernels.chunking import chunked
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.delta_rule import reference
from memcomp_kernels.math import decay, delta


def prepare(inputs: reference.Inputs, spec: reference.Spec) -> affine.Tile:
  """Computes the part of the tile's algebra that needs no memory matrix.

  Inputs are `[batch, heads, tile, dim]`.
  """
  query, key = inputs.query, inputs.key
  dtype = query.dtype
  product = functools.partial(contract.product, dtype=dtype)
  wide = jnp.promote_types(dtype, jnp.float32)
  value, log_decay, rate = (
    x.astype(wide)
    for x in (inputs.value, inputs.log_decay[..., 0], inputs.write_rate)
  )
  factors = decay.decay_factors(log_decay)
  share = factors.between * jnp.swapaxes(rate, -1, -2)
  from_start = factors.from_start[..., None]

  # The solver reads only below the diagonal, where Omega_t is token t's decay.
  coupling = share * product("bhtk,bhik->bhti", key, key)
  target = jnp.concatenate([value, from_start * key], axis=-1)
  solved = delta.solve(coupling, target)
  error, error_key = jnp.split(solved, [value.shape[-1]], axis=-1)

  scale = contract.read_scale(spec, key.shape[-1])
  scores = scale * share * product("bhtk,bhik->bhti", query, key)
  inner = product("bhti,bhik->bhtk", scores, error_key)
  return affine.Tile(
    write=error,
    erase=error_key.astype(dtype),
    key=(factors.to_end[..., None] * rate * key).astype(dtype),
    query=(scale * from_start * query - inner).astype(dtype),
    log_scale=None,  # it is in the query, since A W does not have this factor
    output=product("bhti,bhiv->bhtv", scores, error),
    total=factors.total,
  )


def form(call: dispatch.Call) -> form_lib.Form:
  """Returns the form of the memory."""
  return affine.form(prepare, call)


chunk = chunked.implementation(form)
