"""The delta rule's writes, exactly, by a unit-triangular system.

A memory A [key, value] that writes what it does not yet predict,

  A_t = a_t A_{t-1} + eta_t k_t (x) u_t,      u_t = v_t - k_t A',

where A' is a memory that token t sees, has in a tile of tokens the only
unknowns u, coupled by one lower triangular matrix: with S_{t,i} the share of
write i in A' (zero for i >= t) and base_t that of the memory before the tile,

  u_t + sum_{i < t} S_{t,i} eta_i (k_t . k_i) u_i = v_t - base_t k_t A.

The system is solved by substitution, never by powers of its matrix: with
repeated keys those grow like binomials and cancel.
"""

import jax
import jax.numpy as jnp
from jax import lax


def solve(coupling: jax.Array, target: jax.Array) -> jax.Array:
  """Returns u with u_t + sum_{i < t} coupling_{t,i} u_i = target_t.

  Args:
    coupling: `[..., time, time]`, float32 or wider; only its strict lower
      triangle is read.
    target: `[..., time, value]`.
  """
  batch = jnp.broadcast_shapes(coupling.shape[:-2], target.shape[:-2])
  return lax.linalg.triangular_solve(
    jnp.broadcast_to(coupling, batch + coupling.shape[-2:]),
    jnp.broadcast_to(target, batch + target.shape[-2:]),
    left_side=True,
    lower=True,
    unit_diagonal=True,
  )
