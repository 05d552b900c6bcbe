"""Where a chunk of a kernel starts from: flags of `full_tiles`, acted on.

References and scalars are those of a `tile_kernel` body. Of a memory called
`name` they are `reset_name` (what segments start from), `start_name` (the start
of a chunk that began before the call) and `last_name` (the start of the row's
last chunk, a result); their adjoints are `d_reset_name`, `d_start_name` (both
zeros first) and `d_last_name`. Without chunks in the meaning there is only
`reset_name`.
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
  """The memory before the tile, with `memory` that after the one before."""
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
  """The memory at the chunk's start; kept where it is the last chunk's."""
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
  """The adjoint of the memory after the tile before.

  Args:
    refs: references by name.
    scalars: by name.
    name: the memory's.
    d_memory: the adjoint of the memory before the tile.
    d_start: of that at the chunk's start.
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
  """As `leave`, where memories at chunks' starts are not told apart."""
  if "resets" not in scalars:
    return d_memory

  def resets(d_memory):
    ref = refs[f"d_reset_{name}"]
    ref[...] = tile_kernel.load(ref) + d_memory
    return jnp.zeros_like(d_memory)

  return lax.cond(scalars["resets"] != 0, resets, lambda x: x, d_memory)
