"""One token's write as two factors per slot, with gradients per token.

For every objective and update, token t changes column i to

  s_t = lambda_t s_{t-1} + w_t h_t

with scalars lambda and w per slot and token. They depend on the memory only
through r = s . h and N = |s|^2, before the token. With n = |s| ("orthogonal",
if the column is not tiny) or 1, and a = -gamma c / n:

  delta        lambda = mu               w = a
  orthogonal   lambda = mu - a r / n^2   w = a
  normalized   both of "orthogonal", times beta = |(mu - a r) s + a h|^(-1)

To avoid a difference of large numbers, |(mu - x) s + a h|^2 with a r = x n^2 is
computed as

  mu^2 N + a^2 (|h|^2 - (2 n^2 - N) (r / n^2)^2) + 2 mu x (n^2 - N)

The last term is zero for N = n^2, but its derivative is not. It is needed
because a tile's first memory is differentiated off the unit sphere as well.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.lattice import reference


class TokenInputs(NamedTuple):
  """The inputs of a tile's tokens, in the memory's dtype.

  Attributes:
    query: `[..., time, slots]`.
    key: `[..., time, slots]`.
    value: `[..., time, value]`.
    decay: mu, `[..., time, 1]`.
    rate: gamma, `[..., time, 1]`.
    taken: `[..., time, 1]`, 0 at empty places, which change nothing.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  decay: jax.Array
  rate: jax.Array
  taken: jax.Array


class Columns(NamedTuple):
  """What a write needs to know about the columns, `[..., slots]`.

  Attributes:
    squares: N, |s|^2. After a write that normalised the column it is 1 by
      construction, with no derivative.
    untouched: 1 until such a write, then 0.
  """

  squares: jax.Array
  untouched: jax.Array


def before_tile(S: jax.Array) -> Columns:
  """Returns the columns of a memory `[..., value, slots]`."""
  squares = reference.squared_norms(S)[..., 0, :]
  return Columns(squares, jnp.ones_like(squares))


def over_norm(
  x: jax.Array, squares: jax.Array, spec: reference.Spec
) -> jax.Array:
  """Divides by n, the columns' norms, if the loss is on directions."""
  if spec.update != "orthogonal":
    return x
  return x * lax.rsqrt(_squared_size(squares, spec))


def _squared_size(squares, spec):
  """Returns n^2."""
  if spec.update != "orthogonal":
    return jnp.ones_like(squares)
  return jnp.where(squares > reference.TINY, squares, 1)


def factors(
  share: jax.Array,
  length: jax.Array,
  before: Columns,
  token: TokenInputs,
  spec: reference.Spec,
) -> tuple[jax.Array, jax.Array, Columns]:
  """Returns lambda and w, `[..., slots]`, and the columns after the write.

  Args:
    share: r, `[..., slots]`.
    length: |h|^2, `[..., 1]`.
    before: the columns before the token.
    token: one token without time axis, or all tokens of a tile with it.
    spec: the memory's options.
  """
  mu, N = token.decay, before.squares
  size = _squared_size(N, spec)
  c = token.key
  if spec.objective == "encoding":
    c = over_norm(share, N, spec) - c
  write = over_norm(-token.rate * c, N, spec)
  keep, after = jnp.broadcast_to(mu, write.shape), before
  if spec.update != "delta":
    along = share / size
    off = write * along
    keep = mu - off
    # Rounding could make the square of the tangent negative.
    tangent = jnp.maximum(length - (2 * size - N) * along * along, 0)
    squares = mu * mu * N + write * write * tangent
    squares = squares + 2 * mu * off * (size - N)
    after = before._replace(squares=squares)
    if spec.unit_columns:
      sized = squares > reference.TINY
      beta = lax.rsqrt(jnp.where(sized, squares, 1))
      keep = jnp.where(sized, beta * keep, 1)
      write = jnp.where(sized, beta * write, 0)
      after = Columns(
        jnp.where(sized, 1, N), jnp.where(sized, 0, before.untouched)
      )
  taken = token.taken > 0
  after = jax.tree.map(lambda x, y: jnp.where(taken, x, y), after, before)
  return jnp.where(taken, keep, 1), jnp.where(taken, write, 0), after
