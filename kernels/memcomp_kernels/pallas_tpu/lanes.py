"""Moves heads from sublanes to lanes and back: each lane gets one sequence.

Where a token depends on the token before it, the vector unit processes one
token of many heads at once, with one head per lane. The matrix unit instead
leaves many tokens of one head together. A transpose per place converts between
the two layouts.

A unit (see `blocks`) has `heads` heads on lanes. At each place, every head has
a column of `size` numbers. Either a place is a slot and its column holds
tokens, or a place is a token and its column holds slots. A call takes
`LANES // heads` rows of units. By lane, each head has one lane per row:

  by unit   `[row * places + place, (head, column)]`
  by lane   `[place * size + column, (head, row)]`

The kernel reads with a stride but never writes with one, because a strided
store takes one store per sublane.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memcomp_kernels.pallas_tpu import LANES


def exchange(parts: list[jax.Array]) -> list[jax.Array]:
  """Swaps lane groups: part a's group b becomes part b's group a.

  The function is its own inverse.
  """
  parts = list(parts)
  width = LANES // len(parts)
  lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  distance = len(parts) // 2
  while distance:
    shift = width * distance
    upper = (lane & shift) != 0
    for a in range(len(parts)):
      if a & distance:
        continue
      low, high = parts[a], parts[a + distance]
      parts[a] = jnp.where(upper, pltpu.roll(high, shift, 1), low)
      parts[a + distance] = jnp.where(
        upper, high, pltpu.roll(low, LANES - shift, 1)
      )
    distance //= 2
  return parts


def to_lanes(
  source: jax.Ref,
  places: int,
  place: int,
  *,
  heads: int,
  size: int,
) -> jax.Array:
  """Returns the columns of as many places as heads, from `place` on, by lane.

  Args:
    source: Array by unit, `[registers, rows * places, 128]`. The lanes of
      `[heads, size]` fill as many registers as they need.
    places: Places per row.
    place: First place.
    heads: Heads per unit.
    size: Numbers per column.

  Returns:
    `[heads * size, 128]`, with one place after the other.
  """
  rows = LANES // heads
  columns = []
  for register in range(source.shape[0]):
    stacked = [
      source[register, pl.ds(place + a, rows, stride=places), :]
      for a in range(heads)
    ]
    columns.append(jnp.concatenate(stacked, 0).T)
  columns = jnp.concatenate(columns, 0)
  by_head = [columns[h * size : (h + 1) * size] for h in range(heads)]
  return jnp.concatenate(exchange(by_head), 0)


def from_lanes(columns: list[jax.Array]) -> jax.Array:
  """Undoes `to_lanes`.

  Args:
    columns: `[size, 128]` of each place, of as many places as heads.

  Returns:
    `[places * rows, heads * size]`, with one place after the other.
  """
  return jnp.concatenate(exchange(columns), 0).T
