"""Affine memories by Pallas kernels for Hopper GPUs."""
