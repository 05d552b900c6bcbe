"""One tile of linear attention on matrix units: the algebra, no layout.

Queries and keys are features already. The sum of features is one more column
of the memory, whose values are 1; where a place is empty they are 0, as all
else is there.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels import affine, outer
from memcomp_kernels.chunking import chunked
from memcomp_kernels.linear_attention import reference


def prepare(
  inputs: reference.Inputs, spec: reference.Spec, tiling: None
) -> affine.Tile:
  """Does what needs no memory.

  Args:
    inputs: `[batch, heads, tile, ...]`, features for queries and keys.
    spec: not read: features are taken before, sums divided after.
    tiling: None: all of the tiling is the tile's size.
  """
  del spec, tiling
  query, key, value, log_decay = inputs
  wide = jnp.promote_types(query.dtype, jnp.float32)
  if log_decay is None:
    log_decay = jnp.zeros((*key.shape[:-1], 1))
  log_decay = log_decay[..., 0].astype(wide)
  return outer.prepare(query, key, value.astype(wide), log_decay)


def run(
  memories: chunked.Memories,
  starts: chunked.Memories,
  prepared: affine.Tile,
  complete: jax.Array,
  spec: reference.Spec,
  tiling: None,
) -> tuple[chunked.Memories, jax.Array, None]:
  """Writes and reads one tile.

  Args:
    memories: S before the tile, `[batch, heads, key, value]`.
    starts: not read: nothing is defined by chunk.
    prepared: what else the tile needs.
    complete: not read.
    spec: not read.
    tiling: not read.

  Returns:
    The memory after the tile, reads `[batch, heads, tile, value]` of its
    dtype, and None.
  """
  del starts, complete, spec, tiling
  (memory,) = memories
  memory, output = affine.run(memory, prepared)
  return (memory,), output, None
