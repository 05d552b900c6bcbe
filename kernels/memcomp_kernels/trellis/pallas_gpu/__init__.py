"""Trellis by Pallas kernels for Hopper GPUs."""
