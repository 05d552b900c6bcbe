"""Rates and decay of a tile's tokens, as rows and columns of its arrays.

They lie one kind behind the other in one array: shared memory gives each array
a kilobyte at least.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def parts(ref: Any, kinds: Sequence[str]) -> dict[str, Any]:
  """References to each of `kinds`, whose rows lie one behind the other."""
  size = ref.shape[0] // len(kinds)
  return {kind: ref.at[pl.ds(i * size, size)] for i, kind in enumerate(kinds)}


def along(ref: Any, axis: int, width: int) -> jax.Array:
  """Numbers of tokens `[tokens]` along an axis of `[tokens, width]`.

  Axis 1 puts them along the columns of `[width, tokens]`. A reference is to be
  read along one axis only: the same one in two layouts is one load to the
  compiler, and none.
  """
  layout = plgpu.Layout.WGMMA.reduce(1 - axis)
  x = plgpu.load(ref, layout=layout, optimized=False)
  tokens = x.shape[0]
  shape = (tokens, width) if axis == 0 else (width, tokens)
  return lax.broadcast_in_dim(x, shape, (axis,))


def between(log: Any, since: Any, *, block: int = 0) -> jax.Array:
  """Omega, `[tokens, tokens]`: zero above the diagonal.

  By differences of sums of logs, which cannot overflow.

  Args:
    log: reference to the sums of log decays from the tile's start, `[tokens]`.
    since: reference to a copy of them.
    block: zero for tokens of the same block of so many, a power of 2, too:
      of sums up to the token before the block. 0 for tokens' own.
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
