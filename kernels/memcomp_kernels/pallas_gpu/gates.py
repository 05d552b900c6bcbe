"""Rates and decay of a tile's tokens, as rows and columns of its arrays.

All kinds lie one after the other in one array, because each array in shared
memory takes at least a kilobyte.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def parts(ref: Any, kinds: Sequence[str]) -> dict[str, Any]:
  """Returns a reference for each of `kinds`, which lie one after the other."""
  size = ref.shape[0] // len(kinds)
  return {kind: ref.at[pl.ds(i * size, size)] for i, kind in enumerate(kinds)}


def along(ref: Any, axis: int, width: int) -> jax.Array:
  """Broadcasts numbers of tokens `[tokens]` to `[tokens, width]`.

  They lie along `axis`. Axis 1 puts them along the columns of `[width, tokens]`
  instead. A caller must read a reference along only one axis. The compiler
  merges two loads of one reference into one, and a single load cannot have two
  layouts.
  """
  layout = plgpu.Layout.WGMMA.reduce(1 - axis)
  x = plgpu.load(ref, layout=layout, optimized=False)
  tokens = x.shape[0]
  shape = (tokens, width) if axis == 0 else (width, tokens)
  return lax.broadcast_in_dim(x, shape, (axis,))


def between(log: Any, since: Any, *, block: int = 0) -> jax.Array:
  """Computes Omega, `[tokens, tokens]`: zero above the diagonal.

  It uses differences of sums of logs, which cannot overflow.

  Args:
    log: Reference to sums of log decays from the tile's start, `[tokens]`. A
      sum ends with the token or, with `block`, with the token before its block.
    since: Reference to a copy of the sums that end with the token.
    block: Number of tokens per block, a power of 2. Omega is then also zero
      between tokens of the same block. 0 means that there are no blocks.
  """
  tokens = log.shape[0]
  row, column = (
    plgpu.broadcasted_iota(
      jnp.int32, (tokens, tokens), axis, layout=plgpu.Layout.WGMMA
    )
    for axis in (0, 1)
  )
  passed = along(log, 0, tokens) - along(since, 1, tokens)
  earlier = (row & -block) > column if block else row >= column
  return jnp.where(earlier, jnp.exp(jnp.minimum(passed, 0.0)), 0.0)
