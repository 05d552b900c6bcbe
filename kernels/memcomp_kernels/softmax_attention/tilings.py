"""Performance options of softmax attention; they never change results."""

# Least and greatest tokens per tile of a window. In between, a tile is about as
# long as the ring, so that it sees about as many tokens before it as it has.
_WINDOW_TILES = 32, 1024

# Maximum scores of one head and row in a tile of full attention, and the bounds
# of the tokens per tile that follow from it.
_SCORES = 2**21
_FULL_TILES = 32, 512

# Parts of a row whose queries see keys only up to the part's end. This avoids
# three quarters of the waste of the causal mask.
CAUSAL_PARTS = 4


# Least and greatest tokens per block of a library's TPU kernel. The cost of a
# token is that of its tile's keys, so a small window has small tiles.
KERNEL_TILE = 128
_WIDEST_KERNEL_TILE = 512


def kernel_block(time: int, ring: int) -> int:
  """Returns tokens per block of a library's TPU kernel; divides `time`.

  Args:
    time: a multiple of `KERNEL_TILE`.
    ring: number of tokens that a token sees.
  """
  block = KERNEL_TILE
  while 2 * block <= min(_WIDEST_KERNEL_TILE, ring) and time % (2 * block) == 0:
    block *= 2
  return block


def window_tile(ring: int) -> int:
  """Returns tokens per tile if a token sees `ring` tokens."""
  low, high = _WINDOW_TILES
  return min(max(1 << (ring - 1).bit_length(), low), high)


def full_tile(keys: int) -> int:
  """Returns tokens per tile if each token sees all `keys`."""
  low, high = _FULL_TILES
  return min(max(_SCORES // keys, low), high)
