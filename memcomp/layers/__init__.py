"""Flax NNX layers: one file per mixer, and the pieces around it."""
