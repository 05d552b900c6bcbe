"""Positions of tokens in their segments, for layers that count tokens."""

import jax
import jax.numpy as jnp

from memcomp_kernels import contract


def advance(
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  position: jax.Array,
  time: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns each token's position `[batch, time]`, and the next `[batch]`.

  Args:
    segment_ids: `[batch, time]`; 0 is padding, which takes no position. None if
      all tokens continue the state's segment.
    segment_id: `[batch]`, segment of the state.
    position: `[batch]`, tokens of that segment before this call.
    time: number of tokens per row.
  """
  found = contract.token_positions(segment_ids, segment_id, position, time)
  if segment_ids is None:
    return found, position + time
  index = jnp.where(segment_ids != 0, jnp.arange(time), -1).max(axis=1)
  last = jnp.take_along_axis(found, jnp.maximum(index, 0)[:, None], axis=1)
  return found, jnp.where(index >= 0, last[:, 0] + 1, position)
