"""Draws tokens: repetition penalty, temperature, top-k, top-p, min-p."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memcomp import errors, limits, prng

_LEAST = float(np.finfo(np.float32).smallest_normal)
"""Devices take smaller numbers for 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Sampling settings of one text.

  Attributes:
    temperature: divides the logits; 0 takes the most likely token.
    top_k: keep this many most likely tokens; 0 is all.
    top_p: of those, keep the most likely ones whose mass first reaches this, in
      (0, 1]; 1 is all.
    min_p: of those, keep tokens at least this times as likely as the most
      likely, in [0, 1]; 0 is all.
    repetition_penalty: above 0. For tokens already in the text, positive logits
      are divided by it and negative ones multiplied (from CTRL, arXiv
      1909.05858, equation (1)); 1 is none.
    seed: seed of the draws, in [0, 2**32).

  Raises:
    UserError: a value is out of range.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  seed: int = 0

  def __post_init__(self):
    for name, rule, accepts in (
      ("temperature", "a finite number, 0 or more", lambda x: x >= 0),
      ("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1),
      ("min_p", "a number in [0, 1]", lambda x: 0 <= x <= 1),
      ("repetition_penalty", "a finite number above 0", lambda x: x > 0),
    ):
      value = getattr(self, name)
      if not (_is_number(value) and math.isfinite(value) and accepts(value)):
        raise errors.UserError(f"{name}={value}: give {rule}")
      with np.errstate(over="ignore"):
        narrow = float(np.float32(value))
      if not (math.isfinite(narrow) and accepts(narrow)):
        raise errors.UserError(
          f"{name}={value}: give {rule} in float32, where it is {narrow}"
        )
      if 0 < narrow < _LEAST:
        raise errors.UserError(
          f"{name}={value}: give {_LEAST:.3g} or more; devices take less for 0"
        )
    for name, rule, accepts in (
      ("top_k", "a whole number, 0 (all tokens) or more", lambda x: x >= 0),
      ("seed", limits.A_SEED, limits.is_seed),
    ):
      value = getattr(self, name)
      whole = isinstance(value, numbers.Integral) and _is_number(value)
      if not (whole and accepts(value)):
        raise errors.UserError(f"{name}={value}: give {rule}")


class Knobs(NamedTuple):
  """The settings of a batch as arrays `[batch]`; see `Settings`."""

  temperature: np.ndarray
  top_k: np.ndarray
  top_p: np.ndarray
  min_p: np.ndarray
  repetition_penalty: np.ndarray
  seed: np.ndarray


def knobs(settings: Settings | Sequence[Settings], batch: int) -> Knobs:
  """Returns the settings of `batch` rows as arrays.

  Raises:
    UserError: there is neither one for all nor one for each row.
  """
  each = [settings] * batch if isinstance(settings, Settings) else settings
  if len(each) != batch:
    raise errors.UserError(
      f"{len(each)} settings for {batch} texts: give one, or one each"
    )

  def column(name, dtype):
    values = [getattr(one, name) for one in each]
    if name == "top_k":  # a limit beyond any vocabulary keeps all tokens
      values = [min(value, 2**31 - 1) for value in values]
    return np.array(values, dtype)

  whole = {"top_k": np.int32, "seed": np.uint32}
  return Knobs(*(column(n, whole.get(n, np.float32)) for n in Knobs._fields))


def draw(
  logits: jax.Array, position: jax.Array, used: jax.Array, knobs: Knobs
) -> jax.Array:
  """Draws one token per row; the smaller id wins between equal logits.

  Args:
    logits: float32 `[batch, vocab]`; -inf is never drawn.
    position: int32 `[batch]`, index of this draw for its seed.
    used: bool `[batch, vocab]`, tokens with a repetition penalty.
    knobs: settings; a row's draw depends only on its own.

  Returns:
    Ids, int32 `[batch]`.
  """
  penalty = knobs.repetition_penalty[:, None]
  penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
  logits = jnp.where(used, penalised, logits)
  greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def drawn():
    # Shifting first makes a tiny temperature give -inf, but never inf - inf. At
    # temperature 0 the result is not used, so any positive divisor will do.
    divisor = jnp.where(knobs.temperature > 0, knobs.temperature, 1.0)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / divisor[:, None]
    kept = jnp.where(keep(scaled, knobs), scaled, -jnp.inf)

    def one(seed, position, kept):
      key = jax.random.fold_in(prng.key(seed), position)
      return jax.random.categorical(key, kept)

    return jax.vmap(one)(knobs.seed, position, kept).astype(jnp.int32)

  # The branch skips a sort of the vocabulary, which can take longer than a
  # small model's step.
  tokens = jax.lax.cond(jnp.any(knobs.temperature > 0), drawn, lambda: greedy)
  return jnp.where(knobs.temperature > 0, tokens, greedy)


def keep(logits: jax.Array, knobs: Knobs) -> jax.Array:
  """Returns which tokens remain after top-k, top-p and min-p.

  Args:
    logits: float32 `[batch, vocab]`; the maximum of each row is 0.
    knobs: settings.

  Returns:
    bool `[batch, vocab]`.
  """
  sorts = jnp.any((knobs.top_k > 0) | (knobs.top_p < 1))
  kept = jax.lax.cond(
    sorts,
    jax.vmap(_likeliest),
    lambda logits, *_: jnp.ones(logits.shape, bool),
    logits,
    knobs.top_k,
    knobs.top_p,
  )
  # The most likely token always remains, so min-p needs no softmax.
  return kept & (logits >= jnp.log(knobs.min_p)[:, None])


def _likeliest(logits, top_k, top_p):
  """Returns which of `[vocab]` remain after top-k and then top-p."""
  order = jnp.argsort(-logits, stable=True)
  rank = jnp.arange(logits.shape[0])
  by_rank = jnp.where((top_k <= 0) | (rank < top_k), logits[order], -jnp.inf)
  mass = jax.nn.softmax(by_rank)
  # The mass before a token decides, so the token that reaches top_p remains and
  # there is always one. 1 keeps all, however the sums round.
  before = jnp.cumsum(mass) - mass
  kept = (by_rank > -jnp.inf) & ((before < top_p) | (top_p >= 1))
  return jnp.zeros(logits.shape, bool).at[order].set(kept)


def _is_number(x: object) -> bool:
  return isinstance(x, numbers.Real) and not isinstance(x, bool)
