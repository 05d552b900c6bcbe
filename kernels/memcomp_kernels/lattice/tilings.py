"""Sizes that change the speed of Lattice, never its result."""

# Tokens between which decays are taken pair by pair, slot by slot; those
# further apart go through matrix products. Work on pairs grows with this, work
# on the rest of a chunk with its inverse.
BLOCK_TIME = 16
