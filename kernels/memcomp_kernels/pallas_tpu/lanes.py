"""Moves heads from sublanes to lanes and back: each lane its own sequence.

Where a token waits for the one before, the vector unit takes a token of many
heads at once, a head a lane; the matrix unit leaves many tokens of a head
together. Between the two stands a transpose for each place of a column.

A unit (`blocks`) has `heads` heads on lanes, each with a column of `size`
numbers of a place: tokens of a slot, or slots of a token. Units come in
`LANES // group` rows; on lanes, `group` heads of a unit stand beside each
other, each with all its rows:

  by unit   `[row * places + place, (head, column)]`
  by lane   `[place * size + column, (head of its group, row)]`, a group each

Reads are strided, writes are not: a strided store takes a store a sublane.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128


def exchange(parts: list[jax.Array]) -> list[jax.Array]:
  """Part a's lane group b becomes part b's lane group a; its own inverse."""
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
  group: int,
  size: int,
) -> list[jax.Array]:
  """Columns of `group` places from `place` on, by lane.

  Args:
    source: by unit, `[registers, rows * places, 128]`, the lanes of
      `[heads, size]` in as many registers as they need.
    places: of a row.
    place: the first.
    heads: of a unit.
    group: of heads that share lanes.
    size: of a column.

  Returns:
    For each group of heads, `[group * size, 128]`: one place after the other.
  """
  rows = LANES // group
  columns = []
  for register in range(source.shape[0]):
    stacked = [
      source[register, pl.ds(place + a, rows, stride=places), :]
      for a in range(group)
    ]
    columns.append(jnp.concatenate(stacked, 0).T)
  columns = jnp.concatenate(columns, 0)
  by_head = [columns[h * size : (h + 1) * size] for h in range(heads)]
  return [
    jnp.concatenate(exchange(by_head[first : first + group]), 0)
    for first in range(0, heads, group)
  ]


def from_lanes(columns: list[list[jax.Array]]) -> jax.Array:
  """Undoes `to_lanes`.

  Args:
    columns: for each group of heads, for each of as many places `[size, 128]`.

  Returns:
    `[places * rows, heads * size]`: one place after the other.
  """
  return jnp.concatenate([x for parts in columns for x in exchange(parts)], 0).T
