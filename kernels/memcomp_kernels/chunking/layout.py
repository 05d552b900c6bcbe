"""Lays tokens into tiles and back.

`[batch, time, heads, ...]` to and from `[tiles, batch, heads, chunk, ...]`.
Where an update is defined per chunk, chunks belong to sequences: a state may
arrive in the middle of a chunk, and a packed segment starts one, or goes on
where the state that it starts from stopped. `aligned` is the layout by
reshaping, right when chunks start at the call's first token. `indexed` gives
each chunk a tile of its own, whatever arrives.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract


class Places(NamedTuple):
  """Where tokens belong.

  Attributes:
    tile: `[batch, time]`, the tile of each token; tile 0 is kept for the rest
      of a chunk that began in an earlier call.
    slot: `[batch, time]`, its place in the tile, in [0, chunk).
    valid: bool `[batch, time]`, false at padding.
    starts: bool `[batch, time]`, true where a new segment starts.
    needed: int32 scalar, tiles needed by the fullest row.
    position: int32 `[batch]`, tokens since the last chunk started, at the end.
    segment_id: int32 `[batch]`, the segment of the last token, at the end.
  """

  tile: jax.Array
  slot: jax.Array
  valid: jax.Array
  starts: jax.Array
  needed: jax.Array
  position: jax.Array
  segment_id: jax.Array


class Flags(NamedTuple):
  """Facts about tiles, each bool `[tiles, batch]`.

  Attributes:
    resets: the tile starts a new segment, which may do so inside a chunk.
    continues: the tile continues a chunk that began in an earlier call.
    occupied: the tile holds at least one token.
  """

  resets: jax.Array
  continues: jax.Array
  occupied: jax.Array


@dataclasses.dataclass(frozen=True)
class Layout:
  """A way to lay tokens into tiles.

  Attributes:
    chunk: tokens a tile.
    source: `[batch, tiles * chunk]`, the token at each place, `time` if empty;
      None for the aligned layout.
    place: `[batch, time]`, the place of each token, past the end for padding.
    flags: None for the aligned layout.
  """

  chunk: int
  source: jax.Array | None = None
  place: jax.Array | None = None
  flags: Flags | None = None


def places(
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  position: jax.Array,
  reset_position: jax.Array | int = 0,
  *,
  time: int,
  chunk: int,
) -> Places:
  """Finds each token's tile and slot.

  Args:
    segment_ids: `[batch, time]`, 0 is padding; None if all tokens continue the
      state's segment.
    segment_id: `[batch]`, of the state.
    position: `[batch]`, of the state: tokens since its chunk started.
    reset_position: the same of what new segments start from.
    time: tokens a row.
    chunk: tokens a chunk.
  """
  if segment_ids is None:
    # In closed form: scans of constants are run by the compiler, for minutes.
    since = position[:, None] + jnp.arange(time)
    return Places(
      tile=since // chunk,
      slot=since % chunk,
      valid=jnp.ones(since.shape, bool),
      starts=jnp.zeros(since.shape, bool),
      needed=(jnp.max(position) + time - 1) // chunk + 1,
      position=(position + time) % chunk,
      segment_id=contract.next_segment_id(segment_id),
    )
  starts, last_id = contract.segment_starts(segment_ids, segment_id)
  valid = segment_ids != 0
  count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
  # Rank of the token that the current segment starts at; -1 where it came in.
  first = lax.cummax(jnp.where(starts, count - 1, -1), axis=1)
  reset_position = jnp.broadcast_to(reset_position, position.shape)
  before = jnp.where(
    first >= 0, reset_position[:, None] - first, position[:, None]
  )
  since = before + count - 1
  slot = jnp.where(valid, since % chunk, 0)
  carried = (position > 0).astype(jnp.int32)[:, None]
  first_of_tile = ((valid & (slot == 0)) | starts).astype(jnp.int32)
  tile = jnp.cumsum(first_of_tile, axis=1, dtype=jnp.int32) + carried - 1
  end = jnp.where(count[:, -1] > 0, since[:, -1] + 1, position) % chunk
  return Places(
    tile=tile,
    slot=slot,
    valid=valid,
    starts=starts,
    needed=jnp.max(tile[:, -1]) + 1,
    position=end,
    segment_id=last_id,
  )


def aligned(chunk: int) -> Layout:
  """The layout of calls that start with a chunk and hold one segment."""
  return Layout(chunk)


def indexed(
  where: Places,
  position: jax.Array,
  *,
  chunk: int,
  num_tiles: int,
  first: jax.Array | int = 0,
) -> Layout:
  """The layout for any call, or for a run of its tiles.

  Args:
    where: of `places`.
    position: `[batch]`, as there.
    chunk: tokens a tile.
    num_tiles: tiles laid out; all if it is at least `where.needed`.
    first: the first of them. Tokens of other tiles are left out as padding is.
  """
  batch, time = where.tile.shape
  size = num_tiles * chunk
  tile = where.tile - first
  here = where.valid & (tile >= 0) & (tile < num_tiles)
  place = jnp.where(here, tile * chunk + where.slot, size)
  rows = jnp.arange(batch)[:, None]
  source = jnp.full((batch, size), time, jnp.int32)
  source = source.at[rows, place].set(
    jnp.arange(time, dtype=jnp.int32), mode="drop"
  )
  occupied = jnp.any(source.reshape(batch, num_tiles, chunk) < time, axis=-1)
  resets = jnp.zeros((batch, num_tiles), bool)
  resets = resets.at[rows, jnp.where(where.starts & here, tile, num_tiles)].set(
    True, mode="drop"
  )
  continues = (position > 0)[:, None] & (jnp.arange(num_tiles) + first == 0)
  flags = Flags(resets.T, continues.T, occupied.T)
  return Layout(chunk, source, place, flags)


def complete(layout: Layout, batch: int, time: int) -> jax.Array:
  """Bool `[tiles, batch]`: the tile's last place is taken.

  The chunk that such a tile holds is complete, whether or not it began in an
  earlier call: a chunk's tokens take their places in order.
  """
  if layout.source is None:
    whole = jnp.arange(-(-time // layout.chunk)) < time // layout.chunk
    return jnp.broadcast_to(whole[:, None], (whole.shape[0], batch))
  last = layout.source.reshape(batch, -1, layout.chunk)[..., -1]
  return (last < time).T


def handed_on(layout: Layout, batch: int, time: int) -> jax.Array:
  """Bool `[tiles, batch]`: the tile's chunk is its row's last one.

  None is, in the aligned layout, where rows end with a chunk.
  """
  if layout.flags is None:
    tile = jnp.arange(-(-time // layout.chunk))[:, None]
    unfinished = (tile == tile.size - 1) & (time % layout.chunk > 0)
    return jnp.broadcast_to(unfinished, (tile.size, batch))
  occupied = layout.flags.occupied
  # Tiles are occupied up to the last token, but the first may be empty.
  following = jnp.concatenate(
    [occupied[1:], jnp.zeros_like(occupied[:1])], axis=0
  )
  later = lax.cummax(following.astype(jnp.int32), reverse=True) > 0
  return occupied & ~later


def flat(layout: Layout, x: jax.Array) -> jax.Array:
  """`[batch, time, ...]` to `[batch, tiles * chunk, ...]`; zeros if empty."""
  if layout.source is not None:
    return _gather(x, layout.source)
  padding = -x.shape[1] % layout.chunk
  if not padding:
    return x
  return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))


def lay(layout: Layout, x: jax.Array) -> jax.Array:
  """`[batch, time, heads, ...]` to tiles; empty places hold zeros."""
  x = flat(layout, x)
  x = x.reshape(x.shape[0], -1, layout.chunk, *x.shape[2:])
  return jnp.moveaxis(x, (1, 3), (0, 2))


def unflat(layout: Layout, x: jax.Array, time: int) -> jax.Array:
  """Undoes `flat`; padding tokens get zeros."""
  return x[:, :time] if layout.place is None else _gather(x, layout.place)


def unlay(layout: Layout, x: jax.Array, time: int) -> jax.Array:
  """Tiles to `[batch, time, heads, ...]`; padding tokens get zeros."""
  x = jnp.moveaxis(x, (0, 2), (1, 3))
  return unflat(layout, x.reshape(x.shape[0], -1, *x.shape[3:]), time)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
  """Rows of `x` along axis 1 by `index`; zeros where it is out of range."""
  index = index.reshape(index.shape + (1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)
