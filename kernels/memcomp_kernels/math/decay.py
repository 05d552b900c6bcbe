"""Decay factors of a tile: mu and Omega, from log decays, mask before exp.

With decay factors beta_i = exp(log_decay_i) <= 1 along a tile of tokens,

  mu_r        = prod_{j <= r} beta_j              the start state's share at r
  Omega_{r,i} = prod_{i < j <= r} beta_j, i <= r  the share of write i at r

Ratios are differences of cumulative logs: a quotient of cumulative products
underflows from 64 tokens on at moderate decays.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
  cumulative = jnp.cumsum(log_decay, axis=-1)
  time = log_decay.shape[-1]
  causal = jnp.tril(jnp.ones((time, time), bool))
  difference = cumulative[..., :, None] - cumulative[..., None, :]
  # Above the diagonal the difference is positive and exp could overflow:
  # mask the exponent, not only the result, or its gradient is nan.
  between = jnp.where(causal, jnp.exp(jnp.where(causal, difference, 0.0)), 0.0)
  return Decay(
    from_start=jnp.exp(cumulative),
    between=between,
    to_end=jnp.exp(cumulative[..., -1:] - cumulative),
    total=jnp.exp(cumulative[..., -1]),
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
  cumulative = jnp.cumsum(log_decay, axis=-1)
  before = cumulative - log_decay
  time = log_decay.shape[-1]
  strict = jnp.tril(jnp.ones((time, time), bool), -1)
  difference = before[..., :, None] - cumulative[..., None, :]
  between = jnp.where(strict, jnp.exp(jnp.where(strict, difference, 0.0)), 0.0)
  return DecayBefore(jnp.exp(before), between)
