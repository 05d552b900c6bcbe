"""Pallas kernels for affine memories, for Hopper GPUs."""
