"""One tile of linear attention on matrix units: the algebra, no layout.

Queries and keys are features already. The sum of features is one more column
of the memory, whose values are 1; where a place is empty they are 0, as all
else is there.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.linear_attention import types
from memcomp_kernels.primitives import chunked, decay, outer


def run(
  memories: chunked.Memories,
  starts: chunked.Memories,
  inputs: types.Inputs,
  complete: jax.Array,
  spec: types.Spec,
  tiling: None,
) -> tuple[chunked.Memories, jax.Array, None]:
  """Writes and reads one tile.

  Args:
    memories: S before the tile, `[batch, heads, key, value]`.
    starts: not read: nothing is defined by chunk.
    inputs: `[batch, heads, tile, ...]`, features for queries and keys.
    complete: not read.
    spec: not read: features are taken before, sums divided after.
    tiling: None: all of the tiling is the tile's size.

  Returns:
    The memory after the tile, reads `[batch, heads, tile, value]` of its
    dtype, and None.
  """
  del starts, complete, spec, tiling
  (memory,) = memories
  query, key, value, log_decay = inputs
  if log_decay is None:
    log_decay = jnp.zeros((*key.shape[:-1], 1), memory.dtype)
  factors = decay.decay_factors(log_decay[..., 0].astype(memory.dtype))
  value = value.astype(memory.dtype)
  output = outer.read(memory, query, key, value, factors)
  memory = outer.write(memory, key, value, factors, query.dtype)
  return (memory,), output, None
