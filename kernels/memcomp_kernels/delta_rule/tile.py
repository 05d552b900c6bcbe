"""One tile of the delta rule on matrix units: the algebra, no layout.

Rows are tokens, S is the memory before the tile, E the rows of errors v - k S'
with S' the decayed memory that each token meets. With mu and Omega of
`primitives.decay`,

  (I + strict(Omega * K K^T) diag(beta)) E = V - diag(mu) K S
  O = diag(mu) Q S + A E,      A = (Omega * Q K^T) diag(beta)
  S <- mu_C S + K^T diag(Omega_C beta) E

All but S is known before the tiles are run, for all of them at once: with U and
W what the system makes of V and diag(mu) K (the papers' WY form),

  E = U - W S,      O = (diag(mu) Q - A W) S + A U
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from memcomp_kernels.delta_rule import types
from memcomp_kernels.primitives import chunked, decay, delta, matmul


class Prepared(NamedTuple):
  """What a tile needs beside S; `[batch, heads, tile, dim]` but for `total`.

  What is multiplied by S or by E has the query's dtype, the rest is float32 or
  wider.

  Attributes:
    error: U, the errors of a memory of zeros.
    error_key: W, what asks S for the rest of them.
    output: A U, scaled.
    query: what asks S for the rest of the outputs, scaled.
    key: diag(Omega_C beta) K, what errors are written to.
    total: mu_C, `[batch, heads]`.
  """

  error: jax.Array
  error_key: jax.Array
  output: jax.Array
  query: jax.Array
  key: jax.Array
  total: jax.Array


def prepare(inputs: types.Inputs, spec: types.Spec, tiling: None) -> Prepared:
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
  return Prepared(
    error=error,
    error_key=error_key.astype(dtype),
    output=product("bhti,bhiv->bhtv", scores, error),
    query=(scale * from_start * query - inner).astype(dtype),
    key=(factors.to_end[..., None] * rate * key).astype(dtype),
    total=factors.total,
  )


def run(
  memories: chunked.Memories,
  starts: chunked.Memories,
  prepared: Prepared,
  complete: jax.Array,
  spec: types.Spec,
  tiling: None,
) -> tuple[chunked.Memories, jax.Array, None]:
  """Writes and reads one tile.

  Args:
    memories: S before the tile, `[batch, heads, key, value]`.
    starts: not read: nothing is defined by chunk.
    prepared: `[batch, heads, ...]`.
    complete: not read.
    spec: not read: all of it is prepared.
    tiling: None: all of the tiling is the tile's size.

  Returns:
    The memory after the tile, o `[batch, heads, tile, value]`, and None.
  """
  del starts, complete, spec, tiling
  (memory,) = memories
  dtype = prepared.query.dtype
  product = functools.partial(matmul.product, dtype=dtype)
  error = prepared.error - product(
    "bhtk,bhkv->bhtv", prepared.error_key, memory
  )
  output = prepared.output + product("bhtk,bhkv->bhtv", prepared.query, memory)
  memory = prepared.total[..., None, None] * memory + product(
    "bhtk,bhtv->bhkv", prepared.key, error
  )
  return (memory,), output.astype(dtype), None
