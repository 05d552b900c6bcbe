"""One tile of state space duality on matrix units: the algebra, no layout.

With L = Omega of `primitives.decay`, the paper's 1-semiseparable mask, and h
before the tile,

  Y = (L * (C B^T)) diag(dt) X + diag(mu) C h + D X
  h <- mu_C h + B^T diag(L_C dt) X

which is `primitives.outer` with dt X written. C B^T is computed once a group.
"""

import jax

from memcomp_kernels.primitives import chunked, decay, outer
from memcomp_kernels.state_space_duality import types


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
    memories: h before the tile, `[batch, heads, key, value]`.
    starts: not read: nothing is defined by chunk.
    inputs: `[batch, heads, tile, ...]`, groups for queries and keys.
    complete: not read.
    spec: not read: groups are seen by their shapes.
    tiling: None: all of the tiling is the tile's size.

  Returns:
    The memory after the tile, y `[batch, heads, tile, value]`, and None.
  """
  del starts, complete, spec, tiling
  (memory,) = memories
  query, key = inputs.query, inputs.key
  value, log_decay, rate = (
    x.astype(memory.dtype)
    for x in (inputs.value, inputs.log_decay[..., 0], inputs.write_rate)
  )
  factors = decay.decay_factors(log_decay)
  written = rate * value
  output = outer.read(memory, query, key, written, factors)
  if inputs.skip is not None:
    output += inputs.skip.astype(memory.dtype) * value
  memory = outer.write(memory, key, written, factors, query.dtype)
  return (memory,), output.astype(query.dtype), None
