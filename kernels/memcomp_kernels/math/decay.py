"""Decay factors of a tile, mu and Omega, computed from log decays.

With decay factors alpha_i = exp(log_decay_i) <= 1 along a tile of tokens,

  mu_r        = prod_{j <= r} alpha_j              the start state's share at r
  Omega_{r,i} = prod_{i < j <= r} alpha_j, i <= r  the share of write i at r

Ratios are computed as differences of cumulative logs. A quotient of cumulative
products would underflow from 64 tokens on at moderate decays. Masks are applied
before the exp.

Log decays may be as low as -inf, and a strong decay must not cost digits of the
later ones. Two rules ensure this. Log decays are bounded from below where exp
is zero anyway, and running sums have two parts (`Sums`). TPU kernels whose
products are bfloat16 add the parts up: the products round more than that.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_PARTS = 16  # coarse sums count in units of 1 / 16


def bounded(log_decay: jax.Array) -> jax.Array:
  """Bounds log decays from below without effect: exp of the bound is 0."""
  lowest = -104 if jnp.finfo(log_decay.dtype).bits <= 32 else -746
  return jnp.maximum(log_decay, lowest)


class Sums(NamedTuple):
  """Running sums of log decays, as the sums of two parts.

  After log decays of about -100 per token, a sum in one float32 would keep only
  four digits of the later decays. The coarse part counts sixteenths, which add
  up exactly. The fine part stays small. Differences of each part are exact or
  nearly exact.

  Attributes:
    coarse: multiples of 1 / 16, with zero derivative.
    fine: the remainder.
  """

  coarse: jax.Array
  fine: jax.Array

  @property
  def total(self) -> jax.Array:
    """The sums as one number."""
    return self.coarse + self.fine

  def minus(self, other: "Sums") -> jax.Array:
    """Returns these sums minus other sums of the same tile."""
    return (self.coarse - other.coarse) + (self.fine - other.fine)


def parts(log_decay: jax.Array) -> Sums:
  """Splits each log decay into a coarse and a fine part."""
  log_decay = bounded(log_decay)
  coarse = lax.stop_gradient(jnp.round(log_decay * _PARTS) / _PARTS)
  return Sums(coarse, log_decay - coarse)


def running_sums(log_decay: jax.Array, axis: int = -1) -> Sums:
  """Returns the sums through each token, included; `log_decay` is <= 0."""
  return jax.tree.map(lambda x: jnp.cumsum(x, axis=axis), parts(log_decay))


def sums_before(log_decay: jax.Array, axis: int = -1) -> Sums:
  """Returns the sums up to each token, excluded."""
  own, sums = parts(log_decay), running_sums(log_decay, axis)
  return jax.tree.map(jnp.subtract, sums, own)


def pairs(later: Sums, earlier: Sums) -> jax.Array:
  """Returns the differences of all pairs, `[..., later, earlier]`."""
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
    between=masked_exp(causal, pairs(sums, sums)),
    to_end=jnp.exp(take(sums, (..., slice(-1, None))).minus(sums)),
    total=from_start[..., -1],
  )


class DecayBefore(NamedTuple):
  """Decay factors up to each token, without the token's own decay.

  Attributes:
    from_start: mu_{r-1}, `[..., time]`.
    between: Omega_{r-1,i}, `[..., time, time]`, zero on and above the diagonal.
  """

  from_start: jax.Array
  between: jax.Array


def decay_before(log_decay: jax.Array) -> DecayBefore:
  """Returns the factors before each token's step; `[..., time]`, <= 0."""
  before, sums = sums_before(log_decay), running_sums(log_decay)
  time = log_decay.shape[-1]
  strict = jnp.tril(jnp.ones((time, time), bool), -1)
  between = masked_exp(strict, pairs(before, sums))
  return DecayBefore(jnp.exp(before.total), between)


def masked_exp(mask: jax.Array, exponent: jax.Array) -> jax.Array:
  """Returns exp of `exponent` where `mask`, else 0, whatever it is there."""
  # The exponent must be masked as well as the result, or the gradient is nan.
  return jnp.where(mask, jnp.exp(jnp.where(mask, exponent, 0.0)), 0.0)
