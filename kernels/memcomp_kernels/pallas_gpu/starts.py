"""The memory that a chunk of a kernel starts from, by flags of `full_tiles`.

References and scalars are those of a `tile_kernel` body. A memory called `name`
has these references:

  reset_name    what segments start from
  start_name    the start of a chunk that began before the call
  last_name     the start of the row's last chunk, a result

Their adjoints are `d_reset_name`, `d_start_name` (both are zero at first) and
`d_last_name`. Memories that are not defined by chunk only have `reset_name`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels.pallas_gpu import tile_kernel

KINDS = "reset", "start", "last"


def reset(
  refs: dict[str, Any], scalars: dict[str, jax.Array], name: str, memory
) -> jax.Array:
  """Returns the memory before the tile.

  `memory` is the memory after the previous tile.
  """
  if "resets" not in scalars:
    return memory
  return lax.cond(
    scalars["resets"] != 0,
    lambda _: tile_kernel.load(refs[f"reset_{name}"]),
    lambda memory: memory,
    memory,
  )


def enter(
  refs: dict[str, Any], scalars: dict[str, jax.Array], name: str, memory
) -> jax.Array:
  """Returns the memory at the chunk's start.

  If the chunk is the row's last, the function also stores this memory.
  """
  if "continues" not in scalars:
    return memory
  start = lax.cond(
    scalars["continues"] != 0,
    lambda _: tile_kernel.load(refs[f"start_{name}"]),
    lambda memory: memory,
    memory,
  )

  def store():
    refs[f"last_{name}"][...] = start

  lax.cond(scalars["last"] != 0, store, lambda: None)
  return start


def leave(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  name: str,
  d_memory: jax.Array,
  d_start: jax.Array,
) -> jax.Array:
  """Returns the adjoint of the memory after the previous tile.

  Args:
    refs: References by name.
    scalars: Scalars by name.
    name: Name of the memory.
    d_memory: Adjoint of the memory before the tile.
    d_start: Adjoint of the memory at the chunk's start.
  """
  if "continues" not in scalars:
    return leave_segment(refs, scalars, name, d_memory + d_start)
  d_start = lax.cond(
    scalars["last"] != 0,
    lambda x: x + tile_kernel.load(refs[f"d_last_{name}"]),
    lambda x: x,
    d_start,
  )

  def continues(d_memory, d_start):
    refs[f"d_start_{name}"][...] = d_start
    return d_memory

  d_memory = lax.cond(
    scalars["continues"] != 0, continues, jnp.add, d_memory, d_start
  )
  return leave_segment(refs, scalars, name, d_memory)


def leave_segment(
  refs: dict[str, Any],
  scalars: dict[str, jax.Array],
  name: str,
  d_memory: jax.Array,
) -> jax.Array:
  """Does what `leave` does, without separate memories at chunks' starts."""
  if "resets" not in scalars:
    return d_memory

  def resets(d_memory):
    ref = refs[f"d_reset_{name}"]
    ref[...] = tile_kernel.load(ref) + d_memory
    return jnp.zeros_like(d_memory)

  return lax.cond(scalars["resets"] != 0, resets, lambda x: x, d_memory)
