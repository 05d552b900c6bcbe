"""Rows and heads on lanes: for memories that are written token by token.

A pair is one head of one row of the batch. Where a token's write depends on
the one before in a way that no product of matrices has, the vector unit takes
the tokens of many pairs at once. A block is `LANES` lanes, `parts` for each of
`width` pairs: a part holds its share of the value dimensions, and everything
else of its pair as well. Arrays of a block are

  shared  `[..., n, LANES]`     the same in every part, such as a key
  split   `[..., rows, LANES]`  `rows` value dimensions a part
  memory  `[slots, rows, LANES]`

so that a sum over slots adds registers, and a sum over value dimensions adds
sublanes (`dots`) and then the parts (`all_parts`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class Lanes:
  """How pairs lie on lanes.

  Attributes:
    pairs: rows of the batch times heads.
    parts: lanes of a pair, a power of two.
  """

  pairs: int
  parts: int

  @property
  def width(self) -> int:
    """Pairs of a block."""
    return LANES // self.parts

  @property
  def blocks(self) -> int:
    """Blocks of all pairs; the last one may have empty lanes."""
    return -(-self.pairs // self.width)

  def _by_pair(self, x: jax.Array) -> jax.Array:
    """`[batch, heads, ...]` to `[blocks, ..., width]`."""
    x = x.reshape(self.pairs, *x.shape[2:])
    missing = self.blocks * self.width - self.pairs
    if missing:
      x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    x = x.reshape(self.blocks, self.width, *x.shape[1:])
    return jnp.moveaxis(x, 1, -1)

  def share(self, x: jax.Array) -> jax.Array:
    """`[batch, heads, ...]` to `[blocks, ..., LANES]`; zeros at empty lanes."""
    return jnp.concatenate([self._by_pair(x)] * self.parts, axis=-1)

  def split(self, x: jax.Array) -> jax.Array:
    """`[batch, heads, ..., value]` to `[blocks, ..., rows, LANES]`."""
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
  """Sums `[n, LANES]` over the parts of a pair, for each of them."""
  shift = LANES // parts
  while shift < LANES:
    x = x + pltpu.roll(x, shift, 1)
    shift *= 2
  return x


def folded(x: jax.Array) -> jax.Array:
  """`[rows, LANES]` to `[SUBLANES, LANES]`, by adding registers."""
  parts = [x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES)]
  while len(parts) > 1:
    odd = parts[len(parts) // 2 * 2 :]
    pairs = zip(parts[::2], parts[1::2], strict=False)
    parts = [a + b for a, b in pairs] + odd
  return parts[0]


def sum_rows(arrays: list[jax.Array]) -> jax.Array:
  """Sums of eight `folded` arrays over sublanes, one on each.

  A butterfly: half of each of two registers is moved to the other, so that
  every level halves their number.
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
  """The sum of `[rows, LANES]` over rows, `[1, LANES]`."""
  return jnp.sum(folded(x), axis=0, keepdims=True)


def in_first_part(x: jax.Array, parts: int) -> jax.Array:
  """The sum of `[n, LANES]` over parts, in the first of them; else zeros."""
  if parts == 1:
    return x
  lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  return jnp.where(lane < LANES // parts, all_parts(x, parts), 0.0)
