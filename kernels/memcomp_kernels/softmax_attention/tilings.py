"""Sizes that change the speed of softmax attention, never its result."""

# Tokens a tile of a window: between these, else the ring itself, so that a
# tile sees about as many tokens before it as it has.
_WINDOW_TILES = 32, 1024

# Scores of one head and row that a tile of full attention may hold, and the
# tokens a tile that follow from it.
_SCORES = 2**21
_FULL_TILES = 32, 512

# Parts of a row whose queries see keys up to the part's end only: that skips
# three quarters of the causal mask's waste.
CAUSAL_PARTS = 4


# Tokens that a library's TPU kernel works by, at least and at most; a token
# costs what its tile's keys cost, so a small window has small tiles.
KERNEL_TILE = 128
_WIDEST_KERNEL_TILE = 512


def kernel_block(time: int, ring: int) -> int:
  """Tokens a block of a library's TPU kernel; divides `time`.

  Args:
    time: a multiple of `KERNEL_TILE`.
    ring: tokens that a token sees.
  """
  block = KERNEL_TILE
  while 2 * block <= min(_WIDEST_KERNEL_TILE, ring) and time % (2 * block) == 0:
    block *= 2
  return block


def window_tile(ring: int) -> int:
  """Tokens a tile where a token sees `ring` tokens."""
  low, high = _WINDOW_TILES
  return min(max(1 << (ring - 1).bit_length(), low), high)


def full_tile(keys: int) -> int:
  """Tokens a tile where each sees all `keys`."""
  low, high = _FULL_TILES
  return min(max(_SCORES // keys, low), high)
