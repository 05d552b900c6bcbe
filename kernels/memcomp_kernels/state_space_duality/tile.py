"""One tile of state space duality on matrix units: the algebra, no layout.

With L = Omega of `math.decay`, the paper's 1-semiseparable mask, and h
before the tile,

  Y = (L * (C B^T)) diag(dt) X + diag(mu) C h + D X
  h <- mu_C h + B^T diag(L_C dt) X

which is `outer` with dt X written. C B^T is computed once a group.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels import affine, outer
from memcomp_kernels.chunking import chunked
from memcomp_kernels.state_space_duality import reference


def prepare(
  inputs: reference.Inputs, spec: reference.Spec, tiling: None
) -> affine.Tile:
  """Does what needs no memory.

  Args:
    inputs: `[batch, heads, tile, ...]`, groups for queries and keys.
    spec: not read: groups are seen by their shapes.
    tiling: None: all of the tiling is the tile's size.
  """
  del spec, tiling
  wide = jnp.promote_types(inputs.query.dtype, jnp.float32)
  value, log_decay, rate = (
    x.astype(wide)
    for x in (inputs.value, inputs.log_decay[..., 0], inputs.write_rate)
  )
  prepared = outer.prepare(inputs.query, inputs.key, rate * value, log_decay)
  if inputs.skip is None:
    return prepared
  skipped = inputs.skip.astype(wide) * value
  return prepared._replace(output=prepared.output + skipped)


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
    memories: h before the tile, `[batch, heads, key, value]`.
    starts: not read: nothing is defined by chunk.
    prepared: what else the tile needs.
    complete: not read.
    spec: not read.
    tiling: not read.

  Returns:
    The memory after the tile, y `[batch, heads, tile, value]`, and None.
  """
  del starts, complete, spec, tiling
  (memory,) = memories
  memory, output = affine.run(memory, prepared)
  return (memory,), output.astype(prepared.query.dtype), None
