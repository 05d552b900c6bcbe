"""Rows and heads on lanes: a layout for memories written token by token.

A pair is one head of one row of the batch. Some memories' writes depend on the
token before in a way that no matmul can express. For these, the vector unit
processes one token of many pairs at once. A block is `LANES` lanes, with
`parts` lanes for each of `width` pairs. Each part holds its share of the value
dimensions, and a copy of everything else of its pair. Arrays of a block are

  shared  `[..., n, LANES]`     the same in every part, such as a key
  split   `[..., rows, LANES]`  `rows` value dimensions per part
  memory  `[slots, rows, LANES]`

A sum over slots therefore adds registers. A sum over value dimensions adds
sublanes (`sum_row`, `sum_rows`) and then parts (`all_parts`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.pallas_tpu import LANES, SUBLANES


@dataclasses.dataclass(frozen=True)
class Lanes:
  """Layout of pairs on lanes.

  Attributes:
    pairs: Number of pairs: rows of the batch times heads.
    parts: Lanes per pair, a power of two.
  """

  pairs: int
  parts: int

  @property
  def width(self) -> int:
    """Pairs per block."""
    return LANES // self.parts

  @property
  def blocks(self) -> int:
    """Number of blocks for all pairs; the last one may have empty lanes."""
    return -(-self.pairs // self.width)

  def _by_pair(self, x: jax.Array) -> jax.Array:
    """Converts `[batch, heads, ...]` to `[blocks, ..., width]`."""
    x = x.reshape(self.pairs, *x.shape[2:])
    missing = self.blocks * self.width - self.pairs
    if missing:
      x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    x = x.reshape(self.blocks, self.width, *x.shape[1:])
    return jnp.moveaxis(x, 1, -1)

  def share(self, x: jax.Array) -> jax.Array:
    """Converts `[batch, heads, ...]` to `[blocks, ..., LANES]`, shared.

    Empty lanes get zeros.
    """
    return jnp.concatenate([self._by_pair(x)] * self.parts, axis=-1)

  def split(self, x: jax.Array) -> jax.Array:
    """Converts `[batch, heads, ..., value]` to `[blocks, ..., rows, LANES]`."""
    x = self._by_pair(x)
    *lead, value, width = x.shape
    x = x.reshape(*lead, self.parts, value // self.parts, width)
    return jnp.moveaxis(x, -3, -2).reshape(*lead, -1, LANES)

  def join(self, x: jax.Array, batch: int) -> jax.Array:
    """Undoes `split`."""
    *lead, rows, _ = x.shape
    x = x.reshape(*lead, rows, self.parts, self.width)
    x = jnp.moveaxis(x, -2, -3).reshape(*lead, self.parts * rows, self.width)
    x = jnp.moveaxis(x, -1, 1)
    x = x.reshape(-1, *x.shape[2:])[: self.pairs]
    return x.reshape(batch, -1, *x.shape[1:])


def all_parts(x: jax.Array, parts: int) -> jax.Array:
  """Sums `[n, LANES]` over the parts of a pair; every part gets the sum."""
  shift = LANES // parts
  while shift < LANES:
    x = x + pltpu.roll(x, shift, 1)
    shift *= 2
  return x


def folded(x: jax.Array) -> jax.Array:
  """Reduces `[rows, LANES]` to `[SUBLANES, LANES]` by adding registers."""
  parts = [x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES)]
  while len(parts) > 1:
    odd = parts[len(parts) // 2 * 2 :]
    pairs = zip(parts[::2], parts[1::2], strict=False)
    parts = [a + b for a, b in pairs] + odd
  return parts[0]


def sum_rows(arrays: list[jax.Array]) -> jax.Array:
  """Sums eight `folded` arrays over sublanes; sublane i gets array i's sum.

  This is a butterfly: each level moves half of each of two registers into the
  other register, and so halves the number of registers.
  """
  sublane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
  shift = 1
  while len(arrays) > 1:
    own = (sublane & shift) == 0
    arrays = [
      jnp.where(own, a, b) + pltpu.roll(jnp.where(own, b, a), shift, 0)
      for a, b in zip(arrays[::2], arrays[1::2], strict=True)
    ]
    shift *= 2
  return arrays[0]


def sum_row(x: jax.Array) -> jax.Array:
  """Sums `[rows, LANES]` over rows; the result is `[1, LANES]`."""
  return jnp.sum(folded(x), axis=0, keepdims=True)


def in_first_part(x: jax.Array, parts: int) -> jax.Array:
  """Sums `[n, LANES]` over parts; only the first part gets the sum.

  The other parts get zeros.
  """
  if parts == 1:
    return x
  lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  return jnp.where(lane < LANES // parts, all_parts(x, parts), 0.0)
