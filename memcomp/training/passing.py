"""State passing: rows that begin from a state that other text left behind.

A memory that only ever meets the states of one window fails on older ones.
Where a share of the rows begins from the final state of whatever row stood in
their place one step before, it learns to read and to overwrite states of any
age (Ruiz and Gu, "Understanding and Improving Length Generalization in
Recurrent Models", 2025). The state is detached: no gradient goes into the step
before. All other rows begin as they would without.
"""

from typing import Any

import jax
import jax.numpy as jnp

from memcomp import config as config_lib
from memcomp import prng
from memcomp.data import batch as batch_lib
from memcomp.models import decoder

# Folded into the seed's key, so that no other draw of a step has the same one.
_STREAM = 0x70617373


def keeps_state(config: config_lib.Config) -> bool:
  """Returns whether a step hands states of rows to the next one."""
  return config.training.carry_state or config.training.state_passing > 0


def drawn(config: config_lib.Config, step: jax.Array) -> jax.Array | None:
  """Draws the rows of a step that begin from what stood there before.

  Args:
    config: of the run.
    step: int32 scalar, steps before this one.

  Returns:
    Bool `[batch_size]`, a function of the seed and the step alone; None
    without state passing.
  """
  if not config.training.state_passing:
    return None
  key = jax.random.fold_in(prng.key(config.seed), _STREAM)
  return jax.random.bernoulli(
    jax.random.fold_in(key, step),
    config.training.state_passing,
    (config.training.batch_size,),
  )


def begin(
  config: config_lib.Config,
  module: decoder.Decoder,
  batch: batch_lib.Batch,
  carry: decoder.DecoderState,
  axes: Any,
  passed: jax.Array | None,
) -> decoder.DecoderState:
  """Returns the state that each row begins from.

  Args:
    config: of the run.
    module: the model; a fresh state is its learned one, with a gradient.
    batch: of `rows` rows.
    carry: the state after the row that stood in the same place.
    axes: of each leaf of `carry`, the axis that counts rows.
    passed: bool `[rows]`, which rows begin from `carry` whatever their text;
      None for none. The others begin from it only where `carry_state` is on
      and their text goes on.
  """
  carry = jax.lax.stop_gradient(carry)
  if passed is None:
    return carry
  others = carry
  if not config.training.carry_state:
    others = module.init_state(batch.tokens.shape[0])

  def select(axis, a, b):
    shape = [1] * a.ndim
    shape[axis] = -1
    return jnp.where(passed.reshape(shape), a, b)

  of_row = _first_segment(batch.segment_ids, carry.segment_id)
  return jax.tree.map(select, axes, carry.of_segment(of_row), others)


def _first_segment(
  segment_ids: jax.Array | None, before: jax.Array
) -> jax.Array:
  """Returns the segment that each row begins with, `[rows]`."""
  if segment_ids is None:
    return jnp.ones_like(before)
  first = jnp.argmax(segment_ids != 0, axis=1)
  found = jnp.take_along_axis(segment_ids, first[:, None], axis=1)[:, 0]
  return jnp.where(found != 0, found, before)
