"""Pallas kernels for Trellis, for Hopper GPUs."""
