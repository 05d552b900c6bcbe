"""Draws the next token: temperature, then top-k, then top-p."""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp

from memcomp import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How tokens are drawn.

  Attributes:
    temperature: logits are divided by it; 0 takes the likeliest token.
    top_k: keep this many likeliest tokens; 0 is all.
    top_p: of those keep the likeliest whose mass first reaches this, in (0, 1];
      1 is all.
    seed: of the draws, in [0, 2**32).

  Raises:
    UserError: a value is out of its range.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0

  def __post_init__(self):
    for name, rule, accepts in (
      ("temperature", "a finite number, 0 or more", lambda x: x >= 0),
      ("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1),
    ):
      value = getattr(self, name)
      if not (_is_number(value) and math.isfinite(value) and accepts(value)):
        raise errors.UserError(f"{name}={value}: give {rule}")
    for name, rule, accepts in (
      ("top_k", "a whole number, 0 (all tokens) or more", lambda x: x >= 0),
      ("seed", "a whole number in [0, 2**32)", lambda x: 0 <= x < 2**32),
    ):
      value = getattr(self, name)
      if not (isinstance(value, numbers.Integral) and accepts(value)):
        raise errors.UserError(f"{name}={value}: give {rule}")


def draw(
  logits: jax.Array,
  key: jax.Array,
  *,
  temperature: jax.Array | float,
  top_k: jax.Array | int,
  top_p: jax.Array | float,
) -> jax.Array:
  """Draws one token; of equal logits the smaller id counts as likelier.

  Args:
    logits: float32 `[vocab]`.
    key: random key.
    temperature: see `Settings`, as the rest; may be traced.
    top_k: 0 is all.
    top_p: 1 is all.

  Returns:
    int32 scalar.
  """
  # Shifted first: a tiny temperature then makes -inf but never inf - inf. At
  # temperature 0 any positive number does, the result is not used.
  scaled = logits - logits.max()
  scaled = scaled / jnp.where(temperature > 0, temperature, 1.0)
  kept = jnp.where(keep(scaled, top_k, top_p), scaled, -jnp.inf)
  drawn = jax.random.categorical(key, kept)
  greedy = jnp.argmax(logits)
  return jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)


def keep(
  logits: jax.Array, top_k: jax.Array | int, top_p: jax.Array | float
) -> jax.Array:
  """Returns which tokens top-k and then top-p leave, bool `[vocab]`."""
  order = jnp.argsort(-logits, stable=True)
  rank = jnp.arange(logits.shape[0])
  by_rank = jnp.where((top_k <= 0) | (rank < top_k), logits[order], -jnp.inf)
  mass = jax.nn.softmax(by_rank)
  # The mass before a token, so that the one which reaches top_p stays and
  # there is always one; 1 keeps all, whatever the sums round to.
  before = jnp.cumsum(mass) - mass
  kept = (by_rank > -jnp.inf) & ((before < top_p) | (top_p >= 1))
  return jnp.zeros(logits.shape, bool).at[order].set(kept)


def _is_number(x: object) -> bool:
  return isinstance(x, numbers.Real) and not isinstance(x, bool)
