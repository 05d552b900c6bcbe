"""AdamW or Muon, with warmup and a schedule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from memcomp import config as config_lib
from memcomp.models import abstract

NAMES = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant_then_decay")

Schedule = Callable[[Any], jax.Array]


def make_schedule(config: config_lib.OptimizerConfig, steps: int) -> Schedule:
  """Returns the learning rate as a function of the number of updates so far.

  The first update has the rate `peak / (warmup_steps + 1)`, update
  `warmup_steps` has the peak, and update `steps - 1` the final rate.

  Args:
    config: validated config (`validate.check`).
    steps: number of updates in the whole run.
  """
  peak, final = config.learning_rate, config.final_learning_rate
  warmup = config.warmup_steps

  def schedule(count):
    count = jnp.asarray(count, jnp.float32)
    rising = peak * (count + 1) / (warmup + 1)
    start = warmup
    if config.schedule == "constant_then_decay":
      start = min(round(steps * (1 - config.decay_share)), steps - 2)
      start = max(warmup, start)
    done = (count - start) / max(steps - 1 - start, 1)
    done = jnp.clip(done, 0.0, 1.0)
    if config.schedule == "cosine":
      done = 0.5 - 0.5 * jnp.cos(jnp.pi * done)
    return jnp.where(count < warmup, rising, peak + (final - peak) * done)

  return schedule


def make(
  config: config_lib.OptimizerConfig,
  steps: int,
  masks: abstract.Masks,
  width: int = 0,
) -> optax.GradientTransformation:
  """Returns clip -> Adam or Muon -> weight decay -> learning rate.

  Args:
    config: validated config (`validate.check`).
    steps: number of updates in the whole run.
    masks: trees like the parameters. `base_width` needs `hidden`, whose rates
      scale with the width, and "muon" needs `in_layers`, which it updates.
    width: d_model, required with `base_width`.
  """
  schedule = make_schedule(config, steps)

  def corrected(count):
    # The last transformation multiplies by the learning rate once more.
    return config.weight_decay * schedule(count) / config.learning_rate

  decay = corrected if config.corrected_decay else config.weight_decay
  direction = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
  if config.name == "muon":
    others = jax.tree.map(lambda x: not x, masks.in_layers)
    direction = optax.chain(
      optax.masked(_muon(config.momentum), masks.in_layers),
      optax.masked(direction, others),
    )
  parts = [
    direction,
    optax.add_decayed_weights(decay, mask=masks.decayed),
    optax.scale_by_learning_rate(schedule),
  ]
  if config.base_width:
    # Before the decay, so that rate / r times decay * r keeps the product.
    scale = optax.scale(config.base_width / width)
    parts.insert(1, optax.masked(scale, masks.hidden))
  if config.clip_norm > 0:
    parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
  return optax.chain(*parts)


_ADAMS_RMS = 0.2
"""Root mean square of Adam's updates, as found by arXiv 2502.16982."""


def _muon(momentum: float) -> optax.GradientTransformation:
  """Muon with updates as large as Adam's, so that rates and decay carry over.

  The last two axes form a matrix. Axes before them, such as the layers of a
  stack, number separate matrices.
  """

  def matrices(tree):
    return jax.tree.map(
      lambda x: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), tree
    )

  def as_adam(update):
    # An orthogonal matrix has the root mean square 1 / sqrt(its longer side).
    return _ADAMS_RMS * max(update.shape[-2:]) ** 0.5 * update

  return optax.chain(
    contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=matrices),
    optax.stateless(lambda updates, _: jax.tree.map(as_adam, updates)),
  )
