"""Lays tokens into tiles and back.

This converts `[batch, time, heads, ...]` to `[tiles, batch, heads, chunk, ...]`
and back. Where an update is defined per chunk, chunks belong to sequences. A
state may arrive in the middle of a chunk. A packed segment starts a chunk, or
continues the chunk where the state that it starts from stopped. The aligned
layout is a reshape, correct when chunks start at the call's first token.
`indexed` gives each chunk a tile of its own, for any call.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from memcomp_kernels import contract


class Places(NamedTuple):
  """The tile and slot of every token.

  Attributes:
    tile: `[batch, time]`, the tile of each token. Tile 0 is reserved for the
      rest of a chunk that began in an earlier call.
    slot: `[batch, time]`, the token's place in its tile, in [0, chunk).
    valid: bool `[batch, time]`, false at padding; None without segment ids.
    starts: bool `[batch, time]`, true where a new segment starts; None without
      segment ids.
    needed: int32 scalar, number of tiles that the fullest row needs.
    before: int32 `[batch]`, tokens since the last chunk started, before the
      call; None if a tile may start at any token.
    position: int32 `[batch]`, the same after the call; without meaning if
      `before` is None.
    segment_id: int32 `[batch]`, the segment of the last token.
    inside: bool scalar, whether a new segment would start inside a chunk; None
      without segment ids or without chunks.
  """

  tile: jax.Array
  slot: jax.Array
  valid: jax.Array | None
  starts: jax.Array | None
  needed: jax.Array
  before: jax.Array | None
  position: jax.Array
  segment_id: jax.Array
  inside: jax.Array | None


class Flags(NamedTuple):
  """Facts about tiles, each bool `[tiles, batch]`.

  Attributes:
    resets: the tile starts a new segment, possibly inside a chunk.
    continues: the tile continues a chunk that began in an earlier call.
    occupied: the tile holds at least one token.
  """

  resets: jax.Array
  continues: jax.Array
  occupied: jax.Array


@dataclasses.dataclass(frozen=True)
class Layout:
  """A way to lay tokens into tiles.

  `Layout(batch, time, chunk)` is the aligned layout, of calls with one segment
  that start with a chunk.

  Attributes:
    batch: rows of the call.
    time: tokens per row.
    chunk: tokens per tile.
    source: `[batch, tiles * chunk]`, the token at each place, `time` if the
      place is empty; None for the aligned layout.
    place: `[batch, time]`, the place of each token, out of range for padding.
    flags: None for the aligned layout.
  """

  batch: int
  time: int
  chunk: int
  source: jax.Array | None = None
  place: jax.Array | None = None
  flags: Flags | None = None


def places(
  segment_ids: jax.Array | None,
  segment_id: jax.Array,
  position: jax.Array | None,
  reset_position: jax.Array | None,
  *,
  time: int,
  chunk: int,
) -> Places:
  """Finds each token's tile and slot.

  Args:
    segment_ids: `[batch, time]`; 0 is padding. None means that all tokens
      continue the state's segment.
    segment_id: `[batch]`, segment of the state.
    position: `[batch]`, tokens of the state since its chunk started; None if a
      tile may start at any token.
    reset_position: the same of the state that new segments start from.
    time: tokens per row.
    chunk: tokens per chunk.
  """
  before, inside = position, None
  if position is None:
    position = jnp.zeros_like(segment_id)
  if reset_position is not None and segment_ids is not None:
    inside = jnp.any(reset_position % chunk > 0)
  since = contract.token_positions(
    segment_ids,
    segment_id,
    position,
    time,
    0 if reset_position is None else reset_position,
  )
  if segment_ids is None:
    # This is a closed form because the compiler takes minutes to fold scans of
    # constants.
    return Places(
      tile=since // chunk,
      slot=since % chunk,
      valid=None,
      starts=None,
      needed=(jnp.max(position) + time - 1) // chunk + 1,
      before=before,
      position=(position + time) % chunk,
      segment_id=contract.next_segment_id(segment_id),
      inside=None,
    )
  starts, last_id = contract.segment_starts(segment_ids, segment_id)
  valid = segment_ids != 0
  slot = jnp.where(valid, since % chunk, 0)
  carried = (position > 0).astype(jnp.int32)[:, None]
  first_of_tile = ((valid & (slot == 0)) | starts).astype(jnp.int32)
  tile = jnp.cumsum(first_of_tile, axis=1, dtype=jnp.int32) + carried - 1
  moved = jnp.any(valid, axis=1)
  end = jnp.where(moved, since[:, -1] + 1, position) % chunk
  return Places(
    tile=tile,
    slot=slot,
    valid=valid,
    starts=starts,
    needed=jnp.max(tile[:, -1]) + 1,
    before=before,
    position=end,
    segment_id=last_id,
    inside=inside,
  )


def indexed(
  where: Places,
  *,
  chunk: int,
  num_tiles: int,
  first: jax.Array | int = 0,
) -> Layout:
  """Returns the layout for any call, or for a range of its tiles.

  Args:
    where: result of `places`.
    chunk: tokens per tile.
    num_tiles: number of tiles. They are all tiles if it is at least
      `where.needed`.
    first: index of the first tile. Tokens of other tiles are left out, as
      padding is.
  """
  batch, time = where.tile.shape
  size = num_tiles * chunk
  tile = where.tile - first
  here = (tile >= 0) & (tile < num_tiles)
  if where.valid is not None:
    here &= where.valid
  place = jnp.where(here, tile * chunk + where.slot, size)
  rows = jnp.arange(batch)[:, None]
  source = jnp.full((batch, size), time, jnp.int32)
  source = source.at[rows, place].set(
    jnp.arange(time, dtype=jnp.int32), mode="drop"
  )
  occupied = jnp.any(source.reshape(batch, num_tiles, chunk) < time, axis=-1)
  resets = jnp.zeros((batch, num_tiles), bool)
  if where.starts is not None:
    started = jnp.where(where.starts & here, tile, num_tiles)
    resets = resets.at[rows, started].set(True, mode="drop")
  continues = jnp.zeros_like(resets)
  if where.before is not None:
    is_first = jnp.arange(num_tiles) + first == 0
    continues = (where.before > 0)[:, None] & is_first
  flags = Flags(resets.T, continues.T, occupied.T)
  return Layout(batch, time, chunk, source, place, flags)


def page_tiles(time: int, chunk: int) -> int:
  """Returns the tiles of a page of packed rows of `time` tokens.

  They are enough for documents of four chunks on average, each of which may
  leave one tile partly empty.
  """
  whole = -(-time // chunk)
  return min(whole + max(whole // 4, 2), time + 1)


def valid(layout: Layout) -> jax.Array:
  """Returns bool `[tiles, batch, chunk]`, whether a token is at a place."""
  batch, time, chunk = layout.batch, layout.time, layout.chunk
  source = layout.source
  if source is None:
    source = jnp.arange(-(-time // chunk) * chunk)[None]
  here = jnp.swapaxes((source < time).reshape(source.shape[0], -1, chunk), 0, 1)
  return jnp.broadcast_to(here, (here.shape[0], batch, chunk))


def complete(layout: Layout) -> jax.Array:
  """Returns bool `[tiles, batch]`, whether a token fills the last place.

  The chunk in such a tile is complete, even if it began in an earlier call,
  because the tokens of a chunk fill its places in order.
  """
  return valid(layout)[..., -1]


def handed_on(layout: Layout) -> jax.Array:
  """Returns bool `[tiles, batch]`, whether a tile holds its row's last chunk.

  In the aligned layout all are false if rows end with a complete chunk.
  """
  if layout.flags is None:
    tile = jnp.arange(-(-layout.time // layout.chunk))[:, None]
    unfinished = (tile == tile.size - 1) & (layout.time % layout.chunk > 0)
    return jnp.broadcast_to(unfinished, (tile.size, layout.batch))
  occupied = layout.flags.occupied
  # All tiles up to the last token are occupied, except possibly the first.
  following = jnp.concatenate(
    [occupied[1:], jnp.zeros_like(occupied[:1])], axis=0
  )
  later = lax.cummax(following.astype(jnp.int32), reverse=True) > 0
  return occupied & ~later


def uniform(layout: Layout) -> bool:
  """Returns whether all tiles are whole chunks of one segment."""
  return layout.flags is None and layout.time % layout.chunk == 0


def tile_flags(layout: Layout) -> dict[str, jax.Array]:
  """Returns what kernels ask about tiles, bool `[tiles, batch]` by name.

  `resets` is true where a segment starts, `continues` where a chunk began
  before the call, `last` at the row's last chunk if it is handed on, and
  `complete` where a chunk ends.
  """
  last = handed_on(layout)
  resets = continues = jnp.zeros_like(last)
  if layout.flags is not None:
    resets, continues, occupied = layout.flags
    continues &= occupied
  return {
    "resets": resets,
    "continues": continues,
    "last": last,
    "complete": complete(layout),
  }


RESETS, CONTINUES, LAST, COMPLETE = 1, 2, 4, 8
"""Bits of the `tile_flags` of a tile, in their order."""


def bits(layout: Layout, step: int) -> jax.Array | None:
  """Returns `tile_flags` as bits, int32 `[batch, tiles]`, or None if `uniform`.

  Zeros fill up a multiple of `step` tiles.
  """
  if uniform(layout):
    return None
  in_order = enumerate(tile_flags(layout).values())
  flags = sum((x.T.astype(jnp.int32) << i for i, x in in_order), jnp.int32(0))
  return jnp.pad(flags, [(0, 0), (0, -flags.shape[1] % step)])


def kept(layout: Layout, d_start: Any) -> Any:
  """Returns the gradient of chunk starts that rows hand on unchanged.

  These are rows without a last chunk; it is zero in all others.
  """
  return where_last(layout, jax.tree.map(jnp.zeros_like, d_start), d_start)


def where_last(layout: Layout, new: Any, old: Any) -> Any:
  """Returns `new` in rows whose last chunk is handed on, and `old` in others.

  Both are pytrees of arrays `[batch, ...]`.
  """
  return contract.batched_where(jnp.any(handed_on(layout), axis=0), new, old)


def flat(layout: Layout, tree: Any) -> Any:
  """Converts `[batch, time, ...]` to `[batch, tiles * chunk, ...]`.

  Empty places hold zeros.
  """

  def one(x):
    if layout.source is not None:
      return contract.take(x, layout.source)
    return contract.pad_time(x, layout.chunk)

  return jax.tree.map(one, tree)


def lay(layout: Layout, tree: Any) -> Any:
  """Converts `[batch, time, heads, ...]` to tiles; empty places hold zeros."""

  def one(x):
    x = x.reshape(x.shape[0], -1, layout.chunk, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))

  return jax.tree.map(one, flat(layout, tree))


def unflat(layout: Layout, tree: Any) -> Any:
  """Undoes `flat`; padding tokens become zeros."""

  def one(x):
    if layout.place is None:
      return x[:, : layout.time]
    return contract.take(x, layout.place)

  return jax.tree.map(one, tree)


def unlay(layout: Layout, tree: Any) -> Any:
  """Converts tiles to `[batch, time, heads, ...]`; padding becomes zeros."""

  def one(x):
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])

  return unflat(layout, jax.tree.map(one, tree))
