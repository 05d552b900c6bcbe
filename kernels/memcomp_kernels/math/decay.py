"""Decay factors of a tile: mu and Omega, from log decays, mask before exp.

With decay factors beta_i = exp(log_decay_i) <= 1 along a tile of tokens,

  mu_r        = prod_{j <= r} beta_j              the start state's share at r
  Omega_{r,i} = prod_{i < j <= r} beta_j, i <= r  the share of write i at r

Ratios are differences of cumulative logs: a quotient of cumulative products
underflows from 64 tokens on at moderate decays.

Log decays may be as low as -inf, and what comes after a strong one must not
lose digits to it. So no log decay counts as lower than what exp turns into
zero anyway, and running sums have two parts (`Sums`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_PARTS = 16  # of 1, that coarse sums are counted in


def bounded(log_decay: jax.Array) -> jax.Array:
  """Log decays no lower than makes a difference: exp of the least is 0."""
  lowest = -104 if jnp.finfo(log_decay.dtype).bits <= 32 else -746
  return jnp.maximum(log_decay, lowest)


def for_one_sum(log_decay: jax.Array) -> jax.Array:
  """Log decays for kernels that add a tile's up in one float32.

  At -30 a memory keeps 1e-13 of what it was, far less than float32 tells beside
  what is written next, and the sum of 64 such still has a float32's last digits
  for what follows: an error of at most 6e-5.
  """
  return jnp.maximum(log_decay, -30.0)


class Sums(NamedTuple):
  """Running sums of log decays, as the sums of two parts.

  In one float32 a sum of some -100 per token would keep four digits of what
  follows. The coarse part counts sixteenths, which add up exactly; the fine
  part stays small. Differences of each are exact, or nearly so.

  Attributes:
    coarse: multiples of 1 / 16; derivatives are zero.
    fine: the rest.
  """

  coarse: jax.Array
  fine: jax.Array

  @property
  def total(self) -> jax.Array:
    """The sums in one number."""
    return self.coarse + self.fine

  def minus(self, other: "Sums") -> jax.Array:
    """These sums less others of the same tile."""
    return (self.coarse - other.coarse) + (self.fine - other.fine)


def parts(log_decay: jax.Array) -> Sums:
  """Splits log decays, each by itself, into the parts of sums."""
  log_decay = bounded(log_decay)
  coarse = lax.stop_gradient(jnp.round(log_decay * _PARTS) / _PARTS)
  return Sums(coarse, log_decay - coarse)


def running_sums(log_decay: jax.Array, axis: int = -1) -> Sums:
  """Returns the sums up to and with each token; `log_decay` is <= 0."""
  return jax.tree.map(lambda x: jnp.cumsum(x, axis=axis), parts(log_decay))


def sums_before(log_decay: jax.Array, axis: int = -1) -> Sums:
  """Returns the sums up to and without each token."""
  own, sums = parts(log_decay), running_sums(log_decay, axis)
  return jax.tree.map(jnp.subtract, sums, own)


def pairs(later: Sums, earlier: Sums) -> jax.Array:
  """Differences of all pairs, `[..., later, earlier]`."""
  return take(later, (..., slice(None), None)).minus(
    take(earlier, (..., None, slice(None)))
  )


def take(sums: Sums, index) -> Sums:
  """Indexes both parts."""
  return jax.tree.map(lambda x: x[index], sums)


class Decay(NamedTuple):
  """The decay factors of a tile.

  Attributes:
    from_start: mu, `[..., time]`.
    between: Omega, `[..., time, time]`, zero above the diagonal.
    to_end: the last row of Omega, `[..., time]`.
    total: mu of the last token, `[...]`.
  """

  from_start: jax.Array
  between: jax.Array
  to_end: jax.Array
  total: jax.Array


def decay_factors(log_decay: jax.Array) -> Decay:
  """Returns mu and Omega of a tile; `log_decay` is `[..., time]`, <= 0."""
  sums = running_sums(log_decay)
  time = log_decay.shape[-1]
  causal = jnp.tril(jnp.ones((time, time), bool))
  from_start = jnp.exp(sums.total)
  return Decay(
    from_start=from_start,
    between=_between(causal, sums, sums),
    to_end=jnp.exp(take(sums, (..., slice(-1, None))).minus(sums)),
    total=from_start[..., -1],
  )


class DecayBefore(NamedTuple):
  """Decay factors up to, not including, each token's own.

  Attributes:
    from_start: mu_{r-1}, `[..., time]`.
    between: Omega_{r-1,i}, `[..., time, time]`, zero from the diagonal on.
  """

  from_start: jax.Array
  between: jax.Array


def decay_before(log_decay: jax.Array) -> DecayBefore:
  """Returns what a token sees before its own step; `[..., time]`, <= 0."""
  before, sums = sums_before(log_decay), running_sums(log_decay)
  time = log_decay.shape[-1]
  strict = jnp.tril(jnp.ones((time, time), bool), -1)
  return DecayBefore(jnp.exp(before.total), _between(strict, before, sums))


def _between(seen: jax.Array, later: Sums, earlier: Sums) -> jax.Array:
  """Exp of differences `[..., time, time]` where seen, else zero."""
  difference = pairs(later, earlier)
  # Unseen differences are positive and exp could overflow: mask the exponent,
  # not only the result, or its gradient is nan.
  return jnp.where(seen, jnp.exp(jnp.where(seen, difference, 0.0)), 0.0)
