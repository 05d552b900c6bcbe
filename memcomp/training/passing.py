"""State passing: rows that start from the state that another text left.

A memory that only meets the states of one window fails on older ones. With
state passing, a share of the rows starts from the final state of the row at the
same index one step before. So the memory learns to read and to overwrite states
of any age (Ruiz and Gu, "Understanding and Improving Length Generalization in
Recurrent Models", 2025). The state is detached, so gradients do not enter the
step before. All other rows start as usual.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memcomp import config as config_lib
from memcomp import prng
from memcomp.data import batch as batch_lib
from memcomp.models import decoder

# Folded into the seed's key, to differ from all other draws of a step.
_STREAM = 0x70617373


def keeps_state(config: config_lib.Config) -> bool:
  """Whether a step passes states of rows to the next one."""
  return config.training.carry_state or config.training.state_passing > 0


def drawn(config: config_lib.Config, step: jax.Array) -> jax.Array | None:
  """Draws the rows of a step that start from a previous state.

  Args:
    config: config of the run.
    step: int32 scalar, number of previous steps.

  Returns:
    Bool `[batch_size]`, which depends only on the seed and the step; None
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
  """Returns the initial state of each row.

  Args:
    config: config of the run.
    module: the model; it learns its fresh state, which has a gradient.
    batch: a batch of `rows` rows.
    carry: the state after the previous row at the same index.
    axes: the row axis of each leaf of `carry`.
    passed: bool `[rows]`, rows that start from `carry` whatever their text;
      None for none. The others start from it only with `carry_state`, and if
      their text continues.
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
  segment_ids: jax.Array | np.ndarray | None, before: jax.Array
) -> jax.Array:
  """Returns the first segment of each row, `[rows]`; 0 if it has seen none."""
  if segment_ids is None:
    found = jnp.ones_like(before)
  else:
    first = jnp.argmax(segment_ids != 0, axis=1)
    found = jnp.take_along_axis(segment_ids, first[:, None], axis=1)[:, 0]
  return jnp.where((found != 0) & (before != 0), found, before)
