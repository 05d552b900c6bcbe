"""State space duality token by token, as the paper writes it (2405.21060).

Symbols: x the values, B the keys, C the queries; dt = write_rate, dt A =
log_decay, D = skip; h the state, rows by B (the paper's, transposed).

  h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T     eq. (1a), discretised
  y_t = h_t^T C_t + D x_t                        eq. (1b)

A is a number for each head, not a matrix (section 2.4): that is what makes the
model dual to attention. Heads of a group share B and C (section 7.2).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract
from memcomp_kernels.state_space_duality import types

# The definition does not round float32 to bfloat16, as TPUs do by default.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def step(
  state: types.State, inputs: types.Inputs, *, spec: types.Spec
) -> tuple[types.State, jax.Array]:
  """Writes one token, then reads.

  Args:
    state: the memory before the token.
    inputs: `[batch, heads, dim]` arrays.
    spec: the memory's meaning.

  Returns:
    The state after the token, and y `[batch, heads, value]` in query's dtype.
  """
  h = state.memory
  C, B, x, dtA, dt, D = jax.tree.map(lambda a: a.astype(h.dtype), inputs)
  B, C = (jnp.repeat(a, spec.heads_per_group, axis=1) for a in (B, C))
  h = jnp.exp(dtA)[..., None] * h + _einsum("bhn,bhp->bhnp", B, dt * x)
  y = _einsum("bhnp,bhn->bhp", h, C)
  if D is not None:
    y = y + D * x
  segment_id = contract.next_segment_id(state.segment_id)
  return types.State(h, segment_id), y.astype(inputs.query.dtype)


reference = contract.token_scan(step)
