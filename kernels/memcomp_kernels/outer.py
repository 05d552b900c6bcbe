"""One tile of a memory that sums decayed outer products.

  A_t = a_t A_{t-1} + k_t (x) u_t,      y_t = q_t A_t

Rows are tokens. `math.decay` defines mu and Omega. With A before the tile,

  Y = diag(mu) Q A + (Omega * (Q K^T)) U
  A <- mu_C A + K^T diag(Omega_C) U

`affine` computes both lines.
"""

import jax

from memcomp_kernels import affine
from memcomp_kernels.math import decay, matmul


def prepare(
  query: jax.Array,
  key: jax.Array,
  written: jax.Array,
  log_decay: jax.Array,
) -> affine.Tile:
  """Computes what does not depend on the memory.

  Args:
    query: `[batch, groups, tile, key]`, in the dtype of products.
    key: `[batch, groups, tile, key]`.
    written: U, `[batch, heads, tile, value]`, float32 or wider.
    log_decay: `[batch, heads, tile]`, <= 0.
  """
  dtype, groups = query.dtype, query.shape[1]
  factors = decay.decay_factors(log_decay)
  scores = matmul.product("bgtk,bgik->bgti", query, key, dtype)
  share = affine.split_heads(factors.between, groups) * scores[:, :, None]
  output = matmul.product(
    "bgnti,bgniv->bgntv", share, affine.split_heads(written, groups), dtype
  )
  return affine.Tile(
    write=factors.to_end[..., None] * written,
    erase=None,
    key=key,
    query=query,
    log_scale=decay.running_sums(log_decay).total,
    output=affine.join_heads(output),
    total=factors.total,
  )
