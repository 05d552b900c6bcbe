"""Chunks as full tiles, with as many tokens as a wgmma has rows.

XLA runs these functions around the kernels. Here the chunk size is part of what
a memory computes, and a chunk fits into a tile.
"""

import jax
import jax.numpy as jnp

from memcomp_kernels.chunking import layout as layout_lib

TOKENS = 64


def fill(x: jax.Array) -> jax.Array:
  """Fills up tiles `[tiles, batch, heads, tile, ...]` with empty positions."""
  missing = TOKENS - x.shape[3]
  if not missing:
    return x
  return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)] + [(0, 0)] * (x.ndim - 4))


def unlay(layout: layout_lib.Layout, x: jax.Array) -> jax.Array:
  """Converts full tiles `[tiles, batch, heads, ...]` to the inputs' layout.

  That layout is `[batch, time, heads, ...]`.
  """
  return layout_lib.unlay(layout, x[:, :, :, : layout.chunk])


def flags(layout: layout_lib.Layout) -> dict[str, jax.Array] | None:
  """Returns the tile flags of `layout` as int32, or None if it is uniform."""
  if layout_lib.uniform(layout):
    return None
  found = layout_lib.tile_flags(layout)
  return {name: x.astype(jnp.int32) for name, x in found.items()}


def too_large(
  chunk_size: int, widths: dict[str, tuple[int, tuple[int, ...]]]
) -> str | None:
  """Returns why chunks or arrays do not fit a kernel, or None if they fit.

  Args:
    chunk_size: Tokens per chunk.
    widths: By name, a width and the widths that the kernel supports.
  """
  if chunk_size > TOKENS:
    return f"chunk_size={chunk_size} is more than {TOKENS}"
  for name, (width, allowed) in widths.items():
    if width not in allowed:
      return f"{name}={width} is none of {allowed}"
  return None
