"""Next-token cross entropy, with the logits of few tokens at a time."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class LossSums(NamedTuple):
  """Sums over scored tokens; divide by the count of the whole step.

  Attributes:
    nll: float32 scalar, negative log-likelihood in nats.
    log_z_squared: float32 scalar, squared log-normalizer of the logits.
    count: int32 scalar, number of scored tokens.
    right: int32 scalar, number of scored tokens that are the most likely; of
      equally likely ones the first counts, as in evaluation.
  """

  nll: jax.Array
  log_z_squared: jax.Array
  count: jax.Array
  right: jax.Array


def zero() -> LossSums:
  """Returns the sums over no tokens."""
  return LossSums(jnp.float32(0), jnp.float32(0), jnp.int32(0), jnp.int32(0))


def next_token_loss(
  logits_of: Callable[[jax.Array], jax.Array],
  hidden: jax.Array,
  targets: jax.Array,
  *,
  chunk: int = 0,
) -> LossSums:
  """Scores `targets` under the logits of `hidden`.

  Args:
    logits_of: maps hidden `[..., d_model]` to logits `[..., vocab]`.
    hidden: `[batch, time, d_model]`.
    targets: int32 `[batch, time]`; negative ones are not scored.
    chunk: tokens of a row whose logits exist at the same time, forward and
      backward; 0 is all. It need not divide `time`.

  Returns:
    Sums over all scored tokens of the batch.
  """

  def score(hidden, targets):
    return _sums(logits_of(hidden), targets)

  time = targets.shape[1]
  if chunk <= 0 or chunk >= time:
    return score(hidden, targets)
  score = jax.checkpoint(score, prevent_cse=False)
  parts = time // chunk
  whole = parts * chunk

  # A part takes every parts-th token instead of neighbours, so that a time axis
  # sharded over `context` stays in place. The loss does not depend on the
  # order.
  def split(x):
    x = x[:, :whole].reshape(x.shape[0], chunk, parts, *x.shape[2:])
    return jnp.moveaxis(x, 2, 0)

  def body(total, part):
    return jax.tree.map(jnp.add, total, score(*part)), None

  total, _ = jax.lax.scan(body, zero(), (split(hidden), split(targets)))
  if whole < time:
    rest = score(hidden[:, whole:], targets[:, whole:])
    total = jax.tree.map(jnp.add, total, rest)
  return total


def _sums(logits: jax.Array, targets: jax.Array) -> LossSums:
  logits = logits.astype(jnp.float32)
  # Shift before summing: log_z - logit would lose digits to a large common
  # offset.
  offset = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
  shifted = logits - offset
  log_sum = jnp.log(jnp.exp(shifted).sum(-1))
  # A select and a sum instead of a gather: the transpose needs no scatter, and
  # it partitions along a sharded vocabulary.
  chosen = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  picked = jnp.where(chosen == targets[..., None], shifted, 0.0).sum(-1)
  # After the shift, the most likely token has logit 0. A minimum of numbers
  # partitions along a sharded vocabulary as the sums do.
  best = jnp.where(shifted >= 0, chosen, logits.shape[-1]).min(-1)
  scored = targets >= 0
  log_z = log_sum + offset[..., 0]
  return LossSums(
    nll=jnp.where(scored, log_sum - picked, 0.0).sum(),
    log_z_squared=jnp.where(scored, log_z**2, 0.0).sum(),
    count=scored.sum(dtype=jnp.int32),
    right=(scored & (best == targets)).sum(dtype=jnp.int32),
  )
