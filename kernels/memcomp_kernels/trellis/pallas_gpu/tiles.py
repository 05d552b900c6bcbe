"""Trellis's inputs in the layout of the GPU kernels: full tiles and passes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.math import decay
from memcomp_kernels.pallas_gpu import full_tiles
from memcomp_kernels.trellis.pallas_gpu import writes

PASSES = 2
"""Number of passes: keys, then values. Arrays of both have an axis of passes
after the axis of heads."""


def both(key: jax.Array, value: jax.Array) -> jax.Array:
  """Stacks `[..., heads, m, width]` of each pass, `[..., heads, 2, m, width]`.

  The function pads the narrower array with zeros, which its pass ignores.
  """
  width = max(key.shape[-1], value.shape[-1])
  return jnp.stack([widened(x, width) for x in (key, value)], axis=-3)


def widened(x: jax.Array, width: int) -> jax.Array:
  """Pads the last axis with zeros to `width`."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def parted(x: jax.Array, like: form_lib.Memories) -> form_lib.Memories:
  """Undoes `both`, for arrays with the widths of `like`."""
  key, value = (x[..., i, :, : known.shape[-1]] for i, known in enumerate(like))
  return key, value


def lanes(x: jax.Array, axis: int = 2) -> jax.Array:
  """Merges `[..., heads, 2, ...]`: each pass of a head becomes a head.

  Heads are at `axis`.
  """
  return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def passes(x: jax.Array, axis: int = 2) -> jax.Array:
  """Undoes `lanes`."""
  return x.reshape(*x.shape[:axis], -1, PASSES, *x.shape[axis + 1 :])


def stacked(x: jax.Array, axis: int = 2) -> jax.Array:
  """Merges a head's passes, one's rows after the other's; heads at `axis`."""
  return lanes(x, axis + 1)


def unstacked(x: jax.Array) -> jax.Array:
  """Undoes `stacked`."""
  return x.reshape(*x.shape[:3], PASSES, -1, *x.shape[4:])


def of_passes(x: jax.Array) -> jax.Array:
  """Converts gates `[..., tile, 1 or 2]` by tile to `[..., 2, tile]`."""
  x = jnp.moveaxis(x.astype(jnp.float32), -1, -2)
  return jnp.broadcast_to(x, (*x.shape[:-2], PASSES, x.shape[-1]))


def block_of(form: form_lib.Form) -> int | None:
  """Returns how many tokens of a tile take gradients at one memory.

  It is 1 with gradients per token, and the size of the chunks if a tile has
  several (`sweeps`). None means that the tile is one chunk.
  """
  if not form.spec.chunked:
    return 1
  chunk = form.spec.chunk_size
  return None if form.tile_time == chunk else chunk


def of_blocks(
  x: jax.Array,
  block: int | None,
  function: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """Applies a function of `[..., blocks, tokens]` to `x` `[..., tile]`."""
  if block is None:
    return x
  blocks = x.reshape(*x.shape[:-1], -1, block)
  return function(blocks).reshape(x.shape)


class Tiles:
  """Inputs in the kernels' layout.

  Attributes:
    inputs: Inputs as full tiles, `[tiles, batch, heads, tile, ...]`.
    written: Keys and values, padded to the larger one's width.
    rate: Write rates, `[tiles, batch, heads, 2, tile]`.
    log: Sums of log decays from the tile's start, shaped as `rate`.
    before: The same sums up to the token before. If a tile has several chunks,
      they end with the chunk before.
    decay: mu and Omega of each pass; see `math.decay`.
    block: Result of `block_of`.
    flags: Flags of `full_tiles`, or None.
  """

  def __init__(self, form: form_lib.Form, layout: layout_lib.Layout, operands):
    inputs = layout_lib.lay(layout, operands.inputs)
    self.inputs = inputs = jax.tree.map(full_tiles.fill, inputs)
    self.block = block_of(form)
    self.written = both(inputs.key, inputs.value)
    self.rate = of_passes(inputs.write_rate)
    log_decay = of_passes(inputs.log_decay)
    self.log = jnp.cumsum(log_decay, axis=-1)
    self.before = of_blocks(
      self.log - log_decay,
      self.block,
      lambda x: jnp.broadcast_to(x[..., :1], x.shape),
    )
    self.decay = decay.decay_factors(log_decay)
    self.flags = full_tiles.flags(layout)
    if self.block is not None:
      # No chunk matters, and empty positions do nothing.
      self.flags = None
      if layout.flags is not None:
        self.flags = {"resets": layout.flags.resets.astype(jnp.int32)}

  @property
  def width(self) -> int:
    """Columns of the memory."""
    return self.written.shape[-1]

  @property
  def continues(self) -> bool:
    """Whether chunks may have begun before the call."""
    return self.flags is not None and self.block is None

  def of_writes(self, operands: form_lib.Operands) -> dict[str, jax.Array]:
    """Returns the operands that both kernels of writes read."""
    kinds = {
      "rate": self.rate,
      "to_end": self.decay.to_end,
      "before": self.before,
      "since": self.log,
    }
    kinds = [kinds[kind] for kind in writes.gate_kinds(self.block)]
    given = {
      "written": lanes(self.written),
      "target": self.inputs.target,
      "gates": lanes(jnp.concatenate(kinds, axis=-1)),
      "total": lanes(self.decay.total),
    }
    if self.flags is not None:
      given |= self.flags
    if self.continues:
      given["start_memory"] = lanes(both(*operands.chunk_start), 1)
    return given

  def of_reads(self, saved: jax.Array) -> dict[str, jax.Array]:
    """Returns the operands of both kernels of reads, without directions."""
    return {
      "query": widened(self.inputs.query, self.width),
      "written": stacked(self.written),
      "saved": stacked(passes(saved)),
      "gates": stacked(jnp.concatenate([self.log, self.log], axis=-1)),
    }
