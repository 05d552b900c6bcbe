"""The writes of a tile by forward substitution, token after token.

Inside a tile every column is s_t = A_t s_0 + sum_j W_{t,j} h_j. Per slot, A is
the running product of lambda (see `writes`), W_t = lambda_t W_{t-1}, and
W_{t,t} = w_t. lambda may be negative or zero. So W is computed by products, not
as exp of differences of logarithms. A token needs

  h_t = S_0 (A k_t / n) + sum_j (W_j . k_t / n) h_j - v_t          ("decoding")
  r_t = A (S_0^T h_t) + sum_j W_j (h_j . h_t)

If h is known beforehand ("encoding", "similarity"), two matrix products give
S_0^T h and h . h of all tokens. The gradient runs the same loop in reverse.
Only the memory's own gradient is not summed token by token, but computed by two
matrix products.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract, derivative
from memcomp_kernels.contract import einsum
from memcomp_kernels.lattice import reference
from memcomp_kernels.lattice.per_token import writes


class Solution(NamedTuple):
  """What a tile's tokens wrote, and how they read it.

  Attributes:
    h: the directions, `[..., time, value]`.
    from_start: A_t q_t, `[..., time, slots]`. A read is y_t = S_0 from_start_t
      + sum_j scores_{t,j} h_j.
    scores: W_{t,j} . q_t, `[..., time, time]`.
    keep: A after the last token, `[..., slots]`.
    write: W after the last token, `[..., time, slots]`.
    after: the columns after the last token.
  """

  h: jax.Array
  from_start: jax.Array
  scores: jax.Array
  keep: jax.Array
  write: jax.Array
  after: writes.Columns


def directions(tokens: writes.TokenInputs, spec: reference.Spec) -> jax.Array:
  """Returns h `[..., time, value]` where it is known: not with "decoding"."""
  return tokens.value if spec.objective == "encoding" else -tokens.value


def _solve(
  spec: reference.Spec, S: jax.Array, tokens: writes.TokenInputs
) -> Solution:
  """Returns the solution of one tile.

  Args:
    spec: the memory's options.
    S: memory before the tile, `[batch, heads, value, slots]`.
    tokens: `[batch, heads, time, ...]`.
  """
  return _loop(spec, S, tokens, jnp.zeros_like(tokens.key))[0]


def _solve_fwd(spec, S, tokens):
  if spec.objective == "decoding":  # `_loop` holds S constant
    S, tokens = derivative.only_first((S, tokens))
  solution, vjp, codes = jax.vjp(
    functools.partial(_loop, spec),
    S,
    tokens,
    jnp.zeros_like(tokens.key),
    has_aux=True,
  )
  return solution, (vjp, codes, solution.h)


def _solve_bwd(spec, residuals, cotangents):
  vjp, codes, h = residuals
  dS, dtokens, dprojected = vjp(cotangents)
  if spec.objective == "decoding":
    # h_t = S_0 code_t + ... - v_t, and projected_t = S_0^T h_t.
    dS = dS - einsum("bhtd,bhtm->bhdm", dtokens.value, codes)
    dS = dS + einsum("bhtd,bhtm->bhdm", h, dprojected)
  return dS, dtokens


solve = derivative.custom_vjp(_solve, _solve_fwd, _solve_bwd, (0,))


def _loop(spec, S, tokens, extra):
  """Returns the solution, and A k / n of all tokens.

  `extra` is zeros, added to S_0^T h only to obtain its cotangent. With
  "decoding" S is constant here, and `_solve_bwd` computes its cotangent.
  """
  lead, time = S.shape[:2], tokens.key.shape[-2]
  place = jnp.arange(time)
  h = known = None
  if spec.objective == "decoding":
    carried = jnp.zeros_like(tokens.value)
  else:
    h, carried = directions(tokens, spec), None
    known = (
      einsum("bhdm,bhtd->bhtm", S, h),
      einsum("bhtd,bhjd->bhtj", h, h),
      jnp.sum(h * h, axis=-1, keepdims=True),
    )
  start = lax.stop_gradient(S)

  def body(carry, x):
    A, W, columns, h = carry
    t, token, extra, known = x
    here = (place == t)[:, None]
    code = None
    if known is None:
      key = writes.over_norm(token.key, columns.squares, spec)
      code = A * key
      row = einsum("bhdm,bhm->bhd", start, code) - token.value
      row = row + einsum("bhj,bhjd->bhd", einsum("bhjm,bhm->bhj", W, key), h)
      projected = einsum("bhdm,bhd->bhm", start, row) + extra
      products = einsum("bhjd,bhd->bhj", h, row)
      length = jnp.sum(row * row, axis=-1, keepdims=True)
      h = jnp.where(here, row[..., None, :], h)
    else:
      projected, products, length = known
    # Rows of W from t on are still zero.
    share = A * projected + einsum("bhj,bhjm->bhm", products, W)
    # Without the barrier, XLA recomputes them for each of W's rows.
    keep, write, columns = lax.optimization_barrier(
      writes.factors(share, length, columns, token, spec)
    )
    A = A * keep
    W = jnp.where(here, write[..., None, :], keep[..., None, :] * W)
    reads = A * token.query, einsum("bhjm,bhm->bhj", W, token.query)
    return (A, W, columns, h), (reads, code)

  def by_time(x):
    return jnp.moveaxis(x, -2, 0)

  carry = (
    jnp.ones_like(S[..., 0, :]),
    jnp.zeros((*lead, time, S.shape[-1]), S.dtype),
    writes.before_tile(S),
    carried,
  )
  carry = contract.vary_like(carry, (S, tokens))
  xs = place, *jax.tree.map(by_time, (tokens, extra, known))
  (A, W, columns, carried), (reads, codes) = lax.scan(body, carry, xs)
  (from_start, scores), codes = jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, -2), (reads, codes)
  )
  h = carried if h is None else h
  return Solution(h, from_start, scores, A, W, columns), codes
